"""SuffixIndex against brute force: a state machine that appends, matches, drafts, evicts, trims, saves and loads."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import speceyes_kernels as sk
from speceyes_kernels import suffix_index_reference as reference


class World:
    """An index and its specification, changed and asked alike; what differs is an AssertionError."""

    def __init__(self, rng, specification=reference):
        max_tokens, max_depth = rng.choice([1, 2, 9, 50, 150, 10_000]), rng.choice([1, 2, 5, 64])
        self.alphabet = rng.choice([2, 3, 40])
        self.new = lambda: sk.SuffixIndex(max_tokens=max_tokens, max_depth=max_depth)
        self.ours, self.plain = self.new(), specification.ReferenceSuffixIndex(max_tokens, max_depth)

    def some_id(self, rng):
        return rng.randrange(5)

    def text(self, rng, most):
        """Random, or a piece of what is held, with placeholders here and there."""
        known = self.plain.end_of(self.some_id(rng))
        at, n = rng.randrange(len(known) + 1), rng.randrange(most + 1)
        text = known[at : at + n] if rng.random() < 0.3 else [rng.randrange(self.alphabet) for _ in range(n)]
        return [-1 - rng.randrange(3) if rng.random() < 0.1 else t for t in text]

    def append(self, rng):
        ids = [self.some_id(rng) for _ in range(rng.randrange(4))]
        texts = [self.text(rng, 30) for _ in ids]
        if rng.random() < 0.5:
            joined = np.array([t for text in texts for t in text], np.int64)
            self.ours.append(ids, joined, np.cumsum([0, *map(len, texts)]))
        else:
            self.ours.append(np.array(ids, np.int64), texts)
        for i, text in zip(ids, texts, strict=True):
            self.plain.append(i, text)

    def evict(self, rng):
        ids = [self.some_id(rng) for _ in range(rng.randrange(3))]
        self.ours.evict(ids)
        for i in ids:
            self.plain.evict(i)

    def renew(self, rng):
        """Trimmed, or saved and loaded."""
        before = self.ours.stats()
        if rng.random() < 0.7:
            self.ours.trim()
        else:
            with tempfile.TemporaryDirectory() as folder:
                self.ours.save(f"{folder}/index")
                self.ours = self.new()
                self.ours.load(f"{folder}/index")
        assert {**before, "bytes": 0} == {**self.ours.stats(), "bytes": 0}

    def context(self, rng):
        """What is held, and an end of its own."""
        known = self.plain.end_of(self.some_id(rng))
        return known[: rng.randrange(len(known) + 1)] + self.text(rng, 3)

    def match(self, rng):
        for _ in range(3):
            context = self.context(rng)
            assert tuple(self.ours.match(context)) == self.plain.match(context)

    def propose(self, rng):
        cap, floor, batch = rng.randrange(13), rng.choice([0.0, 0.2137, 0.6137]), rng.randrange(5)
        if rng.random() < 0.5:
            ids = [self.some_id(rng) for _ in range(batch)]
            contexts, given = [self.plain.end_of(i) for i in ids], {"sequence_ids": ids}
        else:
            contexts = [self.context(rng) for _ in range(batch)]
            given = {"contexts": contexts}
            if rng.random() < 0.5:
                flat = np.array([t for c in contexts for t in c], np.int32)
                given = {"contexts": flat, "offsets": np.cumsum([0, *map(len, contexts)])}
        caps = [rng.randrange(cap + 1) for _ in contexts] if rng.random() < 0.5 else None
        drafts = self.ours.propose(**given, max_draft_tokens=cap if caps is None else caps, min_probability=floor)
        assert drafts.lengths.shape == (len(contexts),)
        for i, context in enumerate(contexts):
            tokens, probability = self.plain.propose(context, cap if caps is None else caps[i], floor)
            n = int(drafts.lengths[i])
            assert drafts.tokens[i, :n].tolist() == tokens
            assert drafts.survival[i, :n].tolist() == pytest.approx(probability, rel=1e-5)

    def check_size(self):
        stats = self.ours.stats()
        assert stats["tokens"] == self.plain.tokens <= self.plain.max_tokens
        assert stats["sequences"] == len(self.plain.sequences)
        assert stats["evicted_tokens"] == self.plain.evicted
        if not self.plain.tokens:
            assert stats["nodes"] == 1


SEEDS = st.integers(0, (1 << 32) - 1).map(random.Random)


class SuffixIndexMachine(RuleBasedStateMachine):
    @initialize(rng=SEEDS)
    def build(self, rng):
        self.world = World(rng)

    @rule(rng=SEEDS)
    def append(self, rng):
        self.world.append(rng)

    @rule(rng=SEEDS)
    def append_and_draft(self, rng):
        self.world.append(rng)
        self.world.propose(rng)

    @rule(rng=SEEDS)
    def evict(self, rng):
        self.world.evict(rng)

    @rule(rng=SEEDS)
    def renew(self, rng):
        self.world.renew(rng)

    @rule(rng=SEEDS)
    def match(self, rng):
        self.world.match(rng)

    @rule(rng=SEEDS)
    def propose(self, rng):
        self.world.propose(rng)

    @invariant()
    def same_size(self):
        if hasattr(self, "world"):
            self.world.check_size()


TestSuffixIndex = SuffixIndexMachine.TestCase
TestSuffixIndex.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("(-count[t], -clock[t])", "(-count[t], clock[t])"),
        ("newest = max(clock", "newest = min(clock"),
        ("text = self.sequences.pop(sequence, [])", "text = self.sequences.get(sequence, [])"),
        ("min(self.max_depth, len(context))", "len(context)"),
        ("del text[:gone]", "del text[-gone:]"),
        ("tokens = [t for t in tokens if t >= 0]", "tokens = [max(t, 0) for t in tokens]"),
        ("alive *= count / total", "alive = count / total"),
        ("self.sequences.pop(sequence, None)", "pass"),
        ("plain[i - n : i] == suffix]", "plain[i - n : i] == suffix][:3]"),
    ],
)
def test_a_planted_fault_is_seen(line, fault):
    """Planted in the specification: whichever of the two is wrong, they differ."""
    text = Path(reference.__file__).read_text()
    assert text.count(line) == 1, "the line to break is gone: plant the fault anew"
    broken = types.ModuleType("broken")
    exec(text.replace(line, fault), broken.__dict__)
    with pytest.raises(AssertionError):
        for seed in range(40):
            rng = random.Random(seed)
            world = World(rng, broken)
            for _ in range(40):
                rng.choice([world.append, world.append, world.evict, world.match, world.propose])(rng)
                world.check_size()


def test_long_appends_equal_token_by_token():
    """One call with thousands of tokens (the text is indexed in chunks) and calls of one token give the same index."""
    g = np.random.default_rng(0)
    text = np.concatenate([np.tile(g.integers(0, 50, 300), 4), g.integers(0, 3, 2000)])
    whole, single = sk.SuffixIndex(max_tokens=2500), sk.SuffixIndex(max_tokens=2500)
    whole.append([7], [text])
    for token in text:
        single.append([7], [[int(token)]])
    assert {**whole.stats(), "bytes": 0} == {**single.stats(), "bytes": 0}
    contexts = [g.integers(0, 50, 5) for _ in range(50)] + [text[a : a + 80] for a in range(0, 3000, 37)]
    for a, b in zip(whole.propose(contexts), single.propose(contexts), strict=True):
        inside = torch.arange(32) < whole.propose(contexts).lengths[:, None]
        assert torch.equal(a[inside] if a.dim() > 1 else a, b[inside] if b.dim() > 1 else b)
    assert [whole.match(c) for c in contexts] == [single.match(c) for c in contexts]


def test_results_do_not_depend_on_the_thread_count():
    drafts = []
    for threads in (1, 3):
        index, g = sk.SuffixIndex(threads=threads), np.random.default_rng(0)
        index.append(range(100), [g.integers(0, 4, 200) for _ in range(100)])
        drafts.append(index.propose(sequence_ids=range(100), min_probability=0.01))
    inside = torch.arange(32) < drafts[0].lengths[:, None]
    assert torch.equal(drafts[0].lengths, drafts[1].lengths) and int(inside.sum()) > 300
    assert torch.equal(drafts[0].tokens[inside], drafts[1].tokens[inside])
    assert torch.equal(drafts[0].survival[inside], drafts[1].survival[inside])


def test_calls_of_many_threads():
    """Appends, drafts, trims and evictions at once; then it equals an index that was filled by one thread."""
    index, errors = sk.SuffixIndex(threads=2), []
    texts = [np.random.default_rng(i).integers(0, 5, 400) for i in range(8)]

    def work(i):
        try:
            for at in range(0, 400, 10):
                index.append([i, 100 + i], [texts[i][at : at + 10], [i] * 3])
                drafts = index.propose(sequence_ids=range(8), max_draft_tokens=4)
                inside = torch.arange(4) < drafts.lengths[:, None]
                assert ((drafts.tokens >= 0) & (drafts.tokens < 5) | ~inside).all() or int(drafts.tokens.max()) < 8
                index.match(texts[i][:at])
                index.evict([100 + i])
                if at % 100 == 0:
                    index.trim()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    plain = sk.SuffixIndex()
    plain.append(range(8), texts)
    assert {**index.stats(), "bytes": 0} == {**plain.stats(), "bytes": 0}
    for text in texts:
        mine, theirs = index.match(text[:64]), plain.match(text[:64])
        assert (mine.length, mine.count, mine.distinct) == (theirs.length, theirs.count, theirs.distinct)


def test_calls_release_the_interpreter_lock():
    """Python goes on while a long append runs in another thread."""
    index, text = sk.SuffixIndex(), np.random.default_rng(0).integers(0, 50_000, 400_000)
    index.append([0], [[0]])
    worker = threading.Thread(target=index.append, args=([1], [text]))
    steps = 0
    worker.start()
    while worker.is_alive():
        steps += 1
    worker.join()
    assert steps > 100  # with the lock held: none or one


def test_files(tmp_path):
    index = sk.SuffixIndex(max_depth=8)
    index.append([3, -4, 3], [[1, 2, 3], [7, 7], [1, 2]])
    index.save(tmp_path / "index")
    newest = sk.SuffixIndex(max_tokens=5, max_depth=8)  # of what does not fit, that goes which is the oldest
    newest.load(tmp_path / "index")
    assert (newest.stats()["sequences"], newest.stats()["tokens"], newest.stats()["evicted_tokens"]) == (1, 5, 2)
    cache = sk.DraftCache(max_depth=8, estimator="counts", policy=None)
    cache.load(tmp_path / "index")
    cache.start("request", [1])
    assert cache.propose(["request"], max_draft_tokens=2).tokens.tolist() == [[2, 3]]
    assert sk.cache_info(tmp_path / "index")["tokens"] == 7

    before = index.stats()
    with pytest.raises(sk.CacheFileError, match="expected an empty index, got one with 7 tokens"):
        index.load(tmp_path / "index")
    with pytest.raises(sk.CacheFileError, match="max_depth: expected 9 .this index's., the file has 8"):
        sk.SuffixIndex(max_depth=9).load(tmp_path / "index")
    with pytest.raises(FileNotFoundError):
        sk.SuffixIndex().load(tmp_path / "none")
    assert index.stats() == before
    cache.extend(["request"], [[2, 4]])
    cache.save(tmp_path / "cache")
    index.append([3], [[9]])
    index.save(tmp_path / "later")
    sk.merge_caches([tmp_path / "index", tmp_path / "later"], tmp_path / "merged")
    damaged = (tmp_path / "index").read_bytes()
    (tmp_path / "damaged").write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    for name, why in [
        ("cache", "expected a file of a SuffixIndex, got one of a DraftCache"),
        ("merged", "sequence 3 is there 2 times with different texts"),
        ("damaged", "damaged"),
    ]:
        empty = sk.SuffixIndex(max_depth=8)
        with pytest.raises(sk.CacheFileError, match=why):
            empty.load(tmp_path / name)
        assert empty.stats()["tokens"] == 0


def test_widest_tokens_and_ids():
    index = sk.SuffixIndex()
    big = (1 << 31) - 1
    index.append([-(1 << 63), (1 << 63) - 1], [[big, 0, big, 0], [1]])
    assert index.match([big]) == sk.SuffixMatch(1, 2, 0, 1, [(0, 2)])
    assert index.propose(sequence_ids=[-(1 << 63)], max_draft_tokens=2).tokens.tolist() == [[big, 0]]
    assert index.match([]) == index.match([5]) == sk.SuffixMatch(0, 0, None, 0, [])
    index.append([5, 6], [[], [-1, -7]])  # placeholders begin no sequence
    assert index.stats()["sequences"] == 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: x.append([1.5], [[1]]), TypeError, "sequence_ids: expected a 1-D list of ints, got float64"),
        (lambda x: x.append(["a"], [[1]]), TypeError, "sequence_ids: expected a 1-D list of ints"),
        (lambda x: x.append([True], [[1]]), TypeError, "sequence_ids: expected a 1-D list of ints, got bool"),
        (lambda x: x.append(np.array([1 << 63], np.uint64), [[1]]), ValueError, "sequence_ids: expected ints below"),
        (lambda x: x.append([1], []), ValueError, "tokens: expected 1 arrays, one a sequence, got 0"),
        (lambda x: x.append([1], [1]), TypeError, "tokens: expected a list of arrays, got one of single tokens"),
        (lambda x: x.append([1], np.array([1])), TypeError, "tokens: expected a list of arrays, got a flat one"),
        (lambda x: x.append([1], [[1 << 31]]), ValueError, r"expected token ids below 2\*\*31"),
        (lambda x: x.append([1, 2], [[3], [0.5]]), TypeError, "expected a 1-D list of token ids"),
        (lambda x: x.append([1], [1, 2], [0, 3]), ValueError, "offsets: expected to rise from 0 to 2"),
        (lambda x: x.append([1, 2], [1, 2], [0, 2]), ValueError, "offsets: expected 3 ints"),
        (lambda x: x.append([1, 2], [1, 2], [0, 3, 2]), ValueError, "offsets: expected to rise"),
        (lambda x: x.append([1], 7), TypeError, "tokens: expected a list of arrays"),
        (lambda x: x.append([1], None), TypeError, "tokens: expected a list of arrays"),
        (lambda x: x.propose([[1], [0.5]]), TypeError, r"contexts\[1\]: expected a 1-D list of token ids"),
        (
            lambda x: x.propose([[1]], max_draft_tokens=[0.5]),
            ValueError,
            "max_draft_tokens: expected 1 caps, got float",
        ),
        (lambda x: x.match([[1]]), TypeError, "context: expected a 1-D list of token ids"),
        (lambda x: x.propose(), TypeError, "contexts, sequence_ids: expected one of the two"),
        (lambda x: x.propose([[1]], sequence_ids=[1]), TypeError, "contexts, sequence_ids: expected one of the two"),
        (lambda x: x.propose([[1]], max_draft_tokens=129), ValueError, "max_draft_tokens: expected an int in 0..128"),
        (lambda x: x.propose([[1]], max_draft_tokens=[1, 2]), ValueError, "max_draft_tokens: expected 1 caps"),
        (lambda x: x.propose([[1]], min_probability=-0.1), ValueError, "min_probability: expected a number in"),
        (lambda x: x.evict(7), TypeError, "sequence_ids: expected a 1-D list of ints"),
    ],
)
def test_errors_leave_the_index_as_it_was(call, error, text):
    index = sk.SuffixIndex()
    index.append([1], [[1, 2, 1]])
    before = index.stats()
    with pytest.raises(error, match=text):
        call(index)
    assert index.stats() == before


def test_wrong_options_are_refused():
    for options, error, text in [
        (dict(max_tokens=0), ValueError, "max_tokens: expected an int in 1..2.*30, got 0"),
        (dict(max_tokens=(1 << 30) + 1), ValueError, "max_tokens: expected an int in 1..2"),
        (dict(max_tokens=1.5), TypeError, "max_tokens: expected an int in 1"),
        (dict(max_depth=65), ValueError, "max_depth: expected an int in 1..64, got 65"),
        (dict(threads=0), ValueError, "threads: expected None or an int >= 1, got 0"),
    ]:
        with pytest.raises(error, match=text):
            sk.SuffixIndex(**options)


MEMORY = """
import numpy as np
import speceyes_kernels as sk

def rss():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

g = np.random.default_rng(0)
index = sk.SuffixIndex()
index.append(range(500), [g.integers(0, 50_000, 400) for _ in range(500)])
index.append([1000], [[1, 2, 3, 1, 2]])
index.evict(range(500))
index.append(range(500), [g.integers(0, 50_000, 400) for _ in range(500)])
full, full_rss = index.stats()["bytes"], rss()
for turn in range(4):  # freed memory is reused
    index.evict(range(500))
    index.append(range(500), [g.integers(0, 50_000, 400) for _ in range(500)])
assert index.stats()["bytes"] < 1.02 * full, (full, index.stats())
assert rss() < full_rss + 0.2 * full, (full_rss, rss(), full)
index.evict(range(500))
index.trim()
small, small_rss = index.stats()["bytes"], rss()
assert index.propose(sequence_ids=[1000], max_draft_tokens=1).tokens.tolist() == [[3]]
assert full > 4e6 and small < 0.05 * full, (full, small)
assert full_rss - small_rss > 0.8 * (full - small), (full, small, full_rss, small_rss)
"""


def test_trim_returns_memory_to_the_system():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
