"""DraftCache's save, load and trim against brute force: what is drafted, counted and evicted does not show them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_draft_cache import DraftCacheMachine

import speceyes_kernels as sk
from speceyes_kernels.draft_cache import DraftCache


class ImageMachine(DraftCacheMachine):
    """The machine of `DraftCache`, whose caches are trimmed, saved, and exchanged for what was loaded from their files."""

    def fresh(self, max_tokens):
        return DraftCache(
            estimator="counts",
            policy=None,
            max_tokens=max_tokens,
            max_depth=self.plain.max_depth,
            strict_isolation=self.plain.strict,
            token_bytes=list(self.plain.token_bytes),
        )

    @rule()
    def trim(self):
        before = self.ours.stats()
        self.ours.trim()
        after = self.ours.stats()
        assert {**before, "bytes": 0} == {**after, "bytes": 0}

    @rule()
    def save(self):
        before = self.ours.stats()
        self.ours.save(self.path())
        assert self.ours.stats() == before

    @rule(share=st.sampled_from([1, 1, 2, 5]))
    def reload(self, share):
        """Another process takes over: running requests have ended; with a smaller bound the oldest queries are gone."""
        self.ours.save(self.path())
        max_tokens = max(1, self.plain.max_tokens // share)
        before = self.ours.stats()
        self.ours = self.fresh(max_tokens)
        self.ours.load(self.path())
        for request in sorted(self.plain.live, key=lambda r: self.plain.live[r].order):
            self.plain.stop(request)
        held = self.plain.tokens
        self.plain.max_tokens = max_tokens
        self.plain._make_room(0)
        self.running.clear()
        after = self.ours.stats()
        assert after["evicted_tokens"] == before["evicted_tokens"] + held - self.plain.tokens
        for name in ("proposed", "accepted", "verified"):
            assert after[name] == before[name]
        self.loaded = after
        assert set(self.ours.by_source().values()) == {(0, 0)}

    def path(self):
        if not hasattr(self, "folder"):
            import tempfile

            self.folder = tempfile.TemporaryDirectory()
        return self.folder.name + "/cache"

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestImage = ImageMachine.TestCase
TestImage.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Traffic:
    """The same requests for any number of caches: agents repeat themselves, drafts are verified, requests overlap."""

    def __init__(self, caches, seed=0, first=0, structure=None):
        self.caches, self.random, self.next, self.structure = caches, np.random.default_rng(seed), first, structure
        self.text = np.random.default_rng(99).integers(0, 60, (6, 80))
        self.running: dict[int, tuple[int, int]] = {}  # request -> text, place

    def step(self):
        g = self.random
        while len(self.running) < 5:
            agent, query = int(g.integers(0, 2)), int(g.integers(0, 3))
            prompt = g.integers(0, 60, 10)
            for c in self.caches:
                c.start(self.next, prompt, agent_id=f"agent {agent}", query_id=query, structure=self.structure)
            self.running[self.next] = (agent * 3 + query, 0)
            self.next += 1
        requests = list(self.running)
        drafts = [c.propose(requests, max_draft_tokens=6) for c in self.caches]
        for other in drafts[1:]:
            assert other.lengths.tolist() == drafts[0].lengths.tolist()
            for i, n in enumerate(other.lengths.tolist()):
                assert other.tokens[i, :n].tolist() == drafts[0].tokens[i, :n].tolist()
                assert other.survival[i, :n].tolist() == drafts[0].survival[i, :n].tolist()  # to the bit
        said = []
        for r in requests:
            text, at = self.running[r]
            said.append(
                [t if g.random() < 0.9 else int(g.integers(0, 60)) for t in self.text[text, at : at + 4].tolist()]
            )
            self.running[r] = (text, at + 4)
        for c in self.caches:
            c.extend(requests, said)
        for r in [r for r, (_, at) in self.running.items() if at >= 80 or g.random() < 0.03]:
            self.stop(r)

    def stop(self, request):
        del self.running[request]
        for c in self.caches:
            c.stop(request)


@pytest.mark.parametrize("strict", [False, True])
def test_a_loaded_cache_goes_on_as_the_saved_one(tmp_path, strict):
    """The learned estimator: tables, clocks and the order of eviction are all in the file."""
    options = dict(
        max_tokens=2500, strict_isolation=strict, token_bytes=[bytes([65 + t]) for t in range(60)]
    )  # the bound evicts
    cache = DraftCache(**options)
    traffic = Traffic([cache], structure='[[("C", "D")], [("E", "F")]]')
    for _ in range(150):
        traffic.step()
    for r in list(traffic.running):
        traffic.stop(r)
    cache.save(tmp_path / "cache")
    loaded = DraftCache(**options)
    loaded.load(tmp_path / "cache")
    assert {**cache.stats(), "bytes": 0} == {**loaded.stats(), "bytes": 0}
    assert cache.stats()["evicted_tokens"] > 0
    both = Traffic([cache, loaded], seed=1, first=traffic.next, structure=traffic.structure)
    for _ in range(80):
        both.step()
    assert {**cache.stats(), "bytes": 0} == {**loaded.stats(), "bytes": 0}
    assert cache.stats()["accepted"] > 100


@pytest.mark.parametrize("strict", [False, True])
def test_trim_does_not_show(strict):
    options = dict(max_tokens=2500, strict_isolation=strict, token_bytes=[bytes([65 + t]) for t in range(60)])
    caches = [DraftCache(**options), DraftCache(**options)]
    traffic = Traffic(caches, structure='[[("C", "D")], [("E", "F")]]')
    for i in range(150):
        traffic.step()
        if i % 7 == 0:
            caches[1].trim()
    assert {**caches[0].stats(), "bytes": 0} == {**caches[1].stats(), "bytes": 0}


def test_running_requests_are_saved_as_what_they_said(tmp_path):
    cache = DraftCache(estimator="counts", policy=None)
    cache.start("r", [9] * 100, agent_id="a", query_id=1)
    cache.extend(["r"], [[1, 2, 3, 4]])
    cache.start("silent", [1, 2], agent_id="b")
    cache.save(tmp_path / "cache")
    cache.extend(["r"], [[5]])  # still running
    loaded = DraftCache(estimator="counts", policy=None)
    loaded.load(tmp_path / "cache")
    stats = loaded.stats()
    assert (stats["live_requests"], stats["ended_responses"], stats["tokens"]) == (0, 1, 68)
    loaded.start("new", [7, 1, 2], agent_id="a", query_id=2)
    assert loaded.propose(["new"], max_draft_tokens=5).tokens[0, :2].tolist() == [3, 4]


def test_load_needs_an_empty_cache_of_the_same_options(tmp_path):
    path = tmp_path / "cache"
    DraftCache(max_depth=32).save(path)
    for options, text in [
        ({}, "max_depth: expected 64 .this cache's., the file has 32"),
        (dict(max_depth=32, strict_isolation=True), "strict_isolation: expected 1 .this cache's., the file has 0"),
    ]:
        with pytest.raises(sk.CacheFileError, match=text):
            DraftCache(**options).load(path)
    cache = DraftCache(max_depth=32)
    cache.start("r", [1], agent_id="a", query_id="q")
    with pytest.raises(sk.CacheFileError, match="expected an empty cache, got one with 1 live requests"):
        cache.load(path)
    cache.extend(["r"], [[2]])
    cache.stop("r")
    with pytest.raises(sk.CacheFileError, match="0 live requests and 1 ended responses"):
        cache.load(path)
    cache.forget("a")
    cache.load(path)


@pytest.mark.parametrize(("path", "error"), [(None, TypeError), (7, TypeError), ("", ValueError), ("a\0b", ValueError)])
def test_paths_that_are_none(path, error):
    with pytest.raises(error, match="path: expected"):
        DraftCache().save(path)
    with pytest.raises(error, match="path: expected"):
        DraftCache().load(path)


MEMORY = """
import numpy as np
import speceyes_kernels as sk

def rss():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

g = np.random.default_rng(0)
cache = sk.DraftCache(estimator="counts", policy=None)
cache.start("stays", g.integers(0, 50_000, 100), agent_id="b")
for r in range(300):
    cache.start(r, [1], agent_id="a", query_id=r % 7)
    cache.extend([r], [g.integers(0, 50_000, 1000)])
    cache.stop(r)
cache.extend(["stays"], [[1, 2, 3, 1, 2]])
full, full_rss = cache.stats()["bytes"], rss()
cache.forget("a")
cache.trim()
small, small_rss = cache.stats()["bytes"], rss()
assert cache.propose(["stays"], max_draft_tokens=1).tokens.tolist() == [[3]]
assert full > 20e6, full
assert small < 0.05 * full, (full, small)
assert full_rss - small_rss > 0.8 * (full - small), (full, small, full_rss, small_rss)
cache.trim()
assert cache.stats()["bytes"] == small
"""


def test_trim_returns_memory_to_the_system():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
