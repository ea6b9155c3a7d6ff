"""Files of draft caches: the format, damage of every kind, crashes and rivals during a save, merging, the command."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import speceyes_kernels as sk
from speceyes_kernels.draft_cache import DraftCache, _scope

ROOT = Path(__file__).parent.parent
MAGIC = b"\x89SPDC\r\n\x1a"


# ---- the format, from its description ----------------------------------------------------------------------------------
def crc64(data, crc=0):
    crc ^= (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xC96C5795D7870F42 if crc & 1 else 0)
    return crc ^ ((1 << 64) - 1)


def sealed(body: bytes, version=1) -> bytes:
    head = MAGIC + struct.pack("<IIQ", version, 0, 32 + len(body))
    return head + struct.pack("<Q", crc64(body, crc64(head))) + body


class Parsed:
    """A file read by the description in csrc/drafting/cache_file.{h,cpp}."""

    def __init__(self, data: bytes) -> None:
        assert data[:8] == MAGIC
        version, reserved, size, crc = struct.unpack_from("<IIQQ", data, 8)
        assert (version, reserved, size) == (1, 0, len(data))
        assert crc == crc64(data[32:], crc64(data[:24]))
        self.data, self.at = data, 32
        self.max_depth, self.strict, self.evicted, self.proposed, self.accepted, self.verified, self.judged = (
            self.fixed("<iIqqqqq")
        )
        self.queries = [(*self.fixed("<qq"), self.varint()) for _ in range(self.count())]
        lengths = [(self.varint(), self.varint()) for _ in range(self.count())]
        assert self.count() == sum(n for n, _ in lengths)
        self.responses = [(prompt, self.fixed(f"<{n}i")) for n, prompt in lengths]
        self.runs = [(self.varint(), self.varint()) for _ in range(self.count())]
        self.blocks = [(self.varint(), self.varint()) for _ in range(self.count())]
        (self.layout,) = self.fixed("<I")
        self.cells = {self.fixed("<I")[0]: self.fixed("<ff") for _ in range(self.count())}
        (self.inputs,) = self.fixed("<I")
        self.weights = self.fixed(f"<{self.count()}f")
        self.steps = self.fixed(f"<{self.count()}Q")
        assert self.at == len(data)

    def fixed(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def count(self):
        return self.fixed("<Q")[0]

    def varint(self):
        value = shift = 0
        while True:
            (byte,) = self.fixed("<B")
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def said(self):
        """(query, response) of every response, in order."""
        owners = [(agent, query) for agent, query, n in self.queries for _ in range(n)]
        return list(zip(owners, self.responses, strict=True))


def small_cache(**options) -> DraftCache:
    cache = DraftCache(policy=None, **options)
    for r, (agent, query, text) in enumerate([("a", 1, [5, 6, 7, 5, 6]), ("b", 2, [8, 9]), ("a", 1, [5, 6, 8])]):
        cache.start(r, [3, 4], agent_id=agent, query_id=query)
        cache.propose([r])
        cache.extend([r], [text])
    cache.extend([0, 2, 0], [[1], [2], [3]])
    for r in (1, 0, 2):
        cache.stop(r)
    return cache


def test_the_file_is_as_described(tmp_path):
    assert crc64(b"123456789") == 0x995DC9BBDF1939FA  # CRC-64/XZ
    cache = small_cache(max_depth=16)
    cache.save(tmp_path / "cache")
    file = Parsed((tmp_path / "cache").read_bytes())
    a, b = (_scope("agent", "a"), _scope("query", "a", 1)), (_scope("agent", "b"), _scope("query", "b", 2))
    assert (file.max_depth, file.strict, file.evicted) == (16, 0, 0)
    assert file.queries == [(*b, 1), (*a, 2)]  # by the last start
    assert file.responses == [(2, (3, 4, 8, 9)), (2, (3, 4, 5, 6, 7, 5, 6, 1, 3)), (2, (3, 4, 5, 6, 8, 2))]
    assert file.runs == [(1, 5), (0, 2), (2, 3), (1, 1), (2, 1), (1, 1)]
    assert file.layout > 0 and len(file.cells) > 0 and sum(file.steps) > 0
    stats = cache.stats()
    assert [file.proposed, file.accepted, file.verified, file.judged] == [
        stats[n] for n in ("proposed", "accepted", "verified", "judged")
    ]


def by_hand(max_depth=64, responses=((0, (1, 2, 3)),), runs=((0, 3),), tokens=None, layout=0, counters=(0, 0, 0, 0, 0)):
    """A file of one query, written by the description."""
    body = struct.pack("<iIqqqqq", max_depth, 0, *counters)
    body += struct.pack("<Qqq", 1, _scope("agent", "a"), _scope("query", "a", 1)) + bytes([len(responses)])
    body += struct.pack("<Q", len(responses)) + b"".join(bytes([len(t), p]) for p, t in responses)
    flat = [t for _, text in responses for t in text]
    body += struct.pack(f"<Q{len(flat)}i", len(flat) if tokens is None else tokens, *flat)
    body += struct.pack("<Q", len(runs)) + b"".join(map(bytes, runs)) + struct.pack("<Q", 0)
    return sealed(body + struct.pack("<IQIQQ", layout, 0, 0, 0, 0))


def test_a_file_written_by_the_description_is_read(tmp_path):
    (tmp_path / "cache").write_bytes(by_hand(responses=[(1, (9, 1, 2, 3)), (0, (1, 2, 4))], runs=[(0, 3), (1, 3)]))
    cache = DraftCache(estimator="counts", policy=None)
    cache.load(tmp_path / "cache")
    cache.start("r", [1, 2], agent_id="a", query_id=1)
    drafts = cache.propose(["r"], max_draft_tokens=1)
    assert (drafts.tokens.tolist(), drafts.survival.tolist()) == ([[4]], [[0.5]])  # of equals the newer
    (tmp_path / "cache").write_bytes(by_hand(responses=[(1, (9, 1, 2, 3)), (0, (1, 2, 4))], runs=[(1, 3), (0, 3)]))
    cache = DraftCache(estimator="counts", policy=None)
    cache.load(tmp_path / "cache")
    cache.start("r", [9, 1, 2], agent_id="a", query_id=1)
    assert cache.propose(["r"], max_draft_tokens=1).tokens.tolist() == [[3]]


def test_tables_of_another_estimator_are_left_out_aloud(tmp_path):
    (tmp_path / "cache").write_bytes(by_hand(layout=4_000_000_000))
    cache = DraftCache()
    with pytest.warns(RuntimeWarning, match="its estimator is of another version"):
        cache.load(tmp_path / "cache")
    assert cache.stats()["tokens"] == 3


# ---- damage ------------------------------------------------------------------------------------------------------------
def refused(path: Path, cache: DraftCache, text: str | None = None) -> str:
    with pytest.raises(sk.CacheFileError, match=text) as caught:
        cache.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_damaged_byte_and_every_length_is_refused(tmp_path):
    path, cache = tmp_path / "cache", DraftCache(policy=None)
    small_cache().save(path)
    good = path.read_bytes()
    g = np.random.default_rng(0)
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ int(g.integers(1, 256))]) + good[i + 1 :])
        message = refused(path, cache)
        assert any(w in message for w in ("damaged", "cut short", "of another kind", "format version"))
        path.write_bytes(good[:i])
        refused(path, cache, "cut short|empty file|another kind" if i < 8 else "cut short")
    path.write_bytes(good + b"\0")
    refused(path, cache, "damaged: .* bytes, and its header says")
    assert cache.stats()["tokens"] == cache.stats()["nodes"] == 0
    path.write_bytes(good)
    cache.load(path)  # empty, and usable
    assert cache.stats()["ended_responses"] == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "got an empty file"),
        (b"\x7fELF" + bytes(100), "a file of another kind"),
        (MAGIC.replace(b"\r\n", b"\n") + bytes(100), "a file of another kind"),
        (MAGIC + bytes(10), "cut short: 18 bytes, and the header alone takes 32"),
        (sealed(b"", version=2), "format version 2, and this speceyes_kernels reads up to 1; update"),
        (sealed(b""), "damaged: its content ends early"),
        (by_hand(tokens=1 << 60), "damaged: a count of 1152921504606846976 where"),
        (by_hand(max_depth=65), "contradiction in max_depth 65"),
        (by_hand(runs=[(0, 2)]), "contradiction in the order of time"),
        (by_hand(runs=[(1, 3)]), "contradiction in the order of time"),
        (by_hand(responses=[(3, (1, 2, 3))], runs=[]), "contradiction in the length of a response"),
        (by_hand(responses=[(0, (1, -1, 3))]), "contradiction in a token below 0"),
        (by_hand(counters=(0, -5, 0, 0, 0)), "contradiction in a counter"),
        (by_hand()[:-1] + b"\1", "damaged: its checksum is wrong"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, text):
    (tmp_path / "cache").write_bytes(content)
    cache = DraftCache()
    refused(tmp_path / "cache", cache, text)
    with pytest.raises(sk.CacheFileError, match=text):
        sk.cache_info(tmp_path / "cache")
    with pytest.raises(sk.CacheFileError, match=text):
        sk.merge_caches([tmp_path / "cache"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_files_at_all(tmp_path):
    cache = DraftCache()
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "missing" / "cache")
    with pytest.raises(IsADirectoryError):
        cache.load(tmp_path)
    with pytest.raises(OSError):
        cache.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- the fuzzer --------------------------------------------------------------------------------------------------------
PARTS = ("budget*", "cache_*", "context_*", "draft_cache*", "estimator*", "expansion*", "lookup_*", "parallel*", "structure*")
SOURCES = sorted(p for part in PARTS for p in (ROOT / "csrc/drafting").glob(f"{part}.cpp"))


def fuzz(folder: Path, flags: list[str], executions: int, broken: Path | None = None) -> subprocess.CompletedProcess:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the fuzzer"
    sources = [broken if broken is not None and s.name == broken.name else s for s in SOURCES]
    command = [
        compiler,
        "-std=c++20",
        *flags,
        f"-I{ROOT / 'csrc/drafting'}",
        str(ROOT / "tests/native/cache_file_fuzz.cpp"),
    ]
    subprocess.run([*command, *map(str, sources), "-o", str(folder / "fuzz")], check=True)
    return subprocess.run([folder / "fuzz", "1", str(executions)], capture_output=True, text=True)


SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]


def test_fuzz_under_sanitizers(tmp_path):
    done = fuzz(tmp_path, ["-O0", *SANITIZERS[2:]], 5_000)  # compiling takes longest
    assert done.returncode == 0 and "5000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_fuzz_a_million_executions(tmp_path):
    done = fuzz(tmp_path, SANITIZERS, 1_000_000)
    assert done.returncode == 0 and "1000000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("cache_image.cpp", "run.response >= left.size() || ", ""),
        ("cache_image.cpp", "block.tokens == 0 || ", ""),
        ("cache_image.cpp", "if (!first && block.block", "if (false && block.block"),
        ("cache_file.cpp", "if (n > left() / least)", "if (false)"),
        ("cache_file.cpp", "if (left() < n) refuse", "if (left() + 1 < n) refuse"),
        ("estimator.cpp", "image.cells.back().index >= uint32_t(kCells)", "false"),
        ("draft_cache_image.cpp", "a.clock < b.clock", "a.clock > b.clock"),
    ],
)
def test_the_fuzzer_sees_a_planted_fault(tmp_path, name, line, fault):
    text = (ROOT / "csrc/drafting" / name).read_text()
    assert line in text, "the line to break is gone: plant the fault anew"
    (tmp_path / name).write_text(text.replace(line, fault))
    assert fuzz(tmp_path, SANITIZERS, 30_000, tmp_path / name).returncode != 0


# ---- crashes and rivals ------------------------------------------------------------------------------------------------
CRASHES = """
import os, random, signal, sys, time
import numpy as np
import speceyes_kernels as sk

path, random_ = sys.argv[1], random.Random(0)
caches = []
for version in range(2):
    cache = sk.DraftCache(estimator="counts")
    for r in range(40):
        cache.start(r, [version], agent_id=version, query_id=r)
        cache.extend([r], [np.full(2000, version)])
        cache.stop(r)
    caches.append(cache)
caches[0].save(path)

def savers(n):
    pids = []
    for version in range(n):
        pid = os.fork()
        if pid == 0:
            while True:
                caches[version].save(path)
        pids.append(pid)
    return pids

seen, infos = set(), 0
for attempt in range(10):
    pids = savers(1 + attempt % 2)
    for _ in range(3):  # beside a rival at work: always a whole file
        time.sleep(random_.uniform(0, 0.004))
        info = sk.cache_info(path)
        assert info["responses"] == 40 and info["response_tokens"] == 80_000
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    loaded = sk.DraftCache(estimator="counts", policy=None)
    loaded.load(path)
    loaded.start("r", [1] * 5)
    loaded.start("s", [0] * 5)
    right = loaded.propose(["r", "s"], max_draft_tokens=2, min_survival=0.9).lengths.tolist()
    assert loaded.stats()["ended_responses"] == 40
    seen.add(open(path, "rb").read()[-200_000:-100_000])
left = [name for name in os.listdir(os.path.dirname(path)) if name.endswith(".tmp")]
print(len(seen), "versions seen,", len(left), "saves were cut off")
assert len(seen) == 2 and left
"""


def test_a_killed_save_leaves_a_whole_file(tmp_path):
    script = textwrap.dedent(CRASHES)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "cache")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_save_follows_links_and_leaves_nothing_beside(tmp_path):
    (tmp_path / "real").mkdir()
    small_cache().save(tmp_path / "real" / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "cache")
    DraftCache().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sk.cache_info(tmp_path / "real" / "cache")["responses"] == 0
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cache", "link", "real"]


# ---- merging -----------------------------------------------------------------------------------------------------------
HISTORY = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 1), st.lists(st.integers(0, 1), max_size=2),
        st.lists(st.integers(0, 1), min_size=1, max_size=3), st.booleans(),
    ),
    max_size=6,
)  # fmt: skip


def replica(path: Path, history) -> Parsed:
    """Responses, one after the other or (the last entry) growing beside the one before."""
    cache = DraftCache(policy=None, max_depth=4)
    beside = None
    for r, (agent, query, prompt, text, hold) in enumerate(history):
        cache.start(r, prompt, agent_id=agent, query_id=query)
        cache.propose([r], max_draft_tokens=2)
        cache.extend([r], [text])
        if beside is not None:
            cache.extend([beside], [text])
            cache.stop(beside)
            beside = None
        if hold:
            beside = r
        else:
            cache.stop(r)
    cache.save(path)
    return Parsed(path.read_bytes())


def expected_merge(files: list[Parsed]):
    """Queries with their texts by age, and (text's place, number of tokens) by time, as merge_caches describes them."""
    kept: dict = {}
    stays = []
    for file in files:
        mine: dict = {}
        stays.append([])
        for key in file.said():
            mine[key] = mine.get(key, 0) + 1
            stays[-1].append(mine[key] > kept.get(key, 0))
            if stays[-1][-1]:
                kept[key] = mine[key]
    ages: dict = {}
    for f, file in enumerate(files):
        for q, (agent, query, _) in enumerate(file.queries):
            age = (-(len(file.queries) - q), f, q)
            if (agent, query) not in ages or age[0] > ages[agent, query][0]:
                ages[agent, query] = age
    events = []  # (time back from the end, file, run, response)
    for f, file in enumerate(files):
        left = sum(n for _, n in file.runs)
        for k, (response, n) in enumerate(file.runs):
            events.append((-left, f, k, response, n))
            left -= n
    events.sort()
    ends = {}
    for f, file in enumerate(files):
        left = sum(n for _, n in file.runs)
        for response, n in file.runs:
            left -= n
            ends[f, response] = left
    queries, place = [], {}
    for owner in sorted(ages, key=ages.get):
        lanes = [
            [i for i, (o, _) in enumerate(file.said()) if o == owner and stays[f][i]] for f, file in enumerate(files)
        ]
        texts = []
        while any(lanes):
            f = max((f for f in range(len(files)) if lanes[f]), key=lambda f: (ends[f, lanes[f][0]], -f))
            i = lanes[f].pop(0)
            place[f, i] = len(place)
            texts.append(files[f].responses[i])
        queries.append((owner, texts))
    runs = []
    for _, f, _, response, n in events:
        if (f, response) not in place:
            continue
        if runs and runs[-1][0] == place[f, response]:
            runs[-1] = (runs[-1][0], runs[-1][1] + n)
        else:
            runs.append((place[f, response], n))
    return queries, runs


@settings(max_examples=120, deadline=None)
@given(histories=st.lists(HISTORY, min_size=1, max_size=3), again=st.booleans())
def test_merge_is_as_described(tmp_path_factory, histories, again):
    folder = tmp_path_factory.mktemp("merge")
    if again:
        histories = [*histories, histories[0][:3]]  # a replica that began alike
    paths = [folder / str(i) for i in range(len(histories))]
    files = [replica(p, h) for p, h in zip(paths, histories, strict=True)]
    info = sk.merge_caches(paths, folder / "out")
    merged = Parsed((folder / "out").read_bytes())
    queries, runs = expected_merge(files)
    said = iter(merged.responses)
    assert [((a, q), [next(said) for _ in range(n)]) for a, q, n in merged.queries] == queries
    assert merged.runs == runs
    assert info["responses"] == len(merged.responses) and info["tokens"] == sum(len(t) for _, t in merged.responses)
    assert merged.proposed == sum(f.proposed for f in files)
    assert set(merged.cells) == set().union(*(f.cells for f in files))
    for index, (p, seen) in merged.cells.items():
        mine = [f.cells[index] for f in files if index in f.cells]
        total = sum(s for _, s in mine)
        assert (p, seen) == (pytest.approx(sum(q * s for q, s in mine) / total, rel=1e-6), min(total, 255))
    for row, steps in enumerate(merged.steps):
        assert steps == sum(f.steps[row] for f in files)
        for i in range(row * merged.inputs, (row + 1) * merged.inputs):
            mean = sum(f.weights[i] * f.steps[row] for f in files) / steps if steps else files[0].weights[i]
            assert merged.weights[i] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    DraftCache(policy=None, max_depth=4).load(folder / "out")


def test_merge_of_a_file_with_itself_is_itself(tmp_path):
    small_cache().save(tmp_path / "a")
    sk.merge_caches([tmp_path / "a"], tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "a").read_bytes()
    sk.merge_caches([tmp_path / "a", tmp_path / "a"], tmp_path / "a")  # in place
    a, one = Parsed((tmp_path / "a").read_bytes()), Parsed((tmp_path / "one").read_bytes())
    assert (a.queries, a.responses, a.runs) == (one.queries, one.responses, one.runs)


def test_merge_refuses_what_does_not_agree(tmp_path):
    small_cache().save(tmp_path / "a")
    small_cache(max_depth=8).save(tmp_path / "b")
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(
        sk.CacheFileError, match="/b: does not agree with .*/a: max_depth is 64 in one and 8 in the other"
    ):
        sk.merge_caches([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="missing"):
        sk.merge_caches([tmp_path / "a", tmp_path / "missing"], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"old"
    with pytest.raises(ValueError, match="at least one file, got none"):
        sk.merge_caches([], tmp_path / "out")
    with pytest.raises(TypeError, match="expected a list of paths, got one"):
        sk.merge_caches(str(tmp_path / "a"), tmp_path / "out")


# ---- the command -------------------------------------------------------------------------------------------------------
def speceyes(*arguments) -> subprocess.CompletedProcess:
    code = "from speceyes_kernels.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)


def test_command(tmp_path):
    pytest.importorskip("typer", reason="needs typer: the extra cli")
    small_cache().save(tmp_path / "a")
    done = speceyes("cache", "merge", tmp_path / "a", tmp_path / "a", "-o", tmp_path / "b", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sk.cache_info(tmp_path / "b")
    done = speceyes("cache", "info", tmp_path / "b")
    assert done.returncode == 0 and "responses" in done.stdout
    (tmp_path / "b").write_bytes(b"no")
    done = speceyes("cache", "info", tmp_path / "b")
    assert done.returncode == 1 and "speceyes cache info: " in done.stderr and "another kind" in done.stderr
