"""The run log: cut at every byte, on a disk that forgets, scrambles, refuses and shortens, and after a real SIGKILL."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import virtual_loop
from fake_engine import Scripted
from funnel_cases import Loop, engines, phase_of, queries
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from speceyes_kernels.orchestrator.disk import Disk
from speceyes_kernels.orchestrator.errors import ResumeRefused, RunLogError
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.runlog import RunLog, decode_line, encode_line, read_log
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import Query

HEADER = {"settings": {"tau": 0.98}, "models": ["large", "small"]}


class FaultyDisk:
    """A disk in memory. What was not synced may be lost or scrambled when it crashes; writes may be cut or refused."""

    def __init__(self):
        self.files: dict[str, bytearray] = {}
        self.safe: dict[str, bytes] = {}  # contents that a crash leaves, for files whose folder entry is safe
        self.handles: dict[int, str] = {}
        self.room = None  # bytes until the disk is full
        self.sync_fails = self.short = False
        self.syncs = 0

    def make_folder(self, path):
        pass

    def sync_folder(self, path):
        for name in self.files:
            self.safe.setdefault(name, b"")

    def open_append(self, path):
        self.files.setdefault(str(path), bytearray())
        handle = len(self.handles) + 1
        self.handles[handle] = str(path)
        return handle

    def lock(self, handle, path):
        pass

    def read(self, path):
        return bytes(self.files[str(path)])

    def write(self, handle, data):
        if self.room is not None and len(data) > self.room:
            if not self.short:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[: self.room]
        if self.room is not None:
            self.room -= len(data)
        self.files[self.handles[handle]] += data
        return len(data)

    def sync(self, handle):
        self.syncs += 1
        if self.sync_fails:
            raise OSError(errno.EIO, "Input/output error")
        name = self.handles[handle]
        if name in self.safe:
            self.safe[name] = bytes(self.files[name])

    def truncate(self, handle, size):
        del self.files[self.handles[handle]][size:]

    def close(self, handle):
        pass

    def exists(self, path):
        return str(path) in self.files

    def rename(self, old, new):
        self.files[str(new)] = self.files.pop(str(old))

    def crash(self, rng):
        """Synced bytes stay; of the rest some bytes come, some as rubbish."""
        for name in list(self.files):
            if name not in self.safe:
                del self.files[name]
                continue
            safe, data = self.safe[name], bytes(self.files[name])
            rest = bytearray(data[len(safe) :][: rng.randint(0, len(data) - len(safe))] if data.startswith(safe) else b"")
            for i in range(len(rest)):
                if rng.random() < 0.02:
                    rest[i] = rng.randrange(256)
            self.files[name] = bytearray(safe) + rest
            self.safe[name] = bytes(self.files[name])
        self.handles.clear()
        self.room, self.sync_fails, self.short = None, False, False


def _go(log, asked, *, stop_after=None, **options):
    """Runs queries; answers that were handed out, and the two engines."""
    large, small = engines(large=2, small=2, by_query={"q1": {"judge": _yes()}, "q3": {"draft": _low()}})
    out = []

    async def main():
        made = FunnelSettings(in_flight=4, **options)
        try:
            async with Funnel(large, small, settings=made, agent=Loop(), log=log) as funnel:
                async for answer in funnel.run(asked):
                    out.append(answer)
                    if len(out) == stop_after:
                        return
        finally:
            if log.broken is None:
                await log.aclose()

    virtual_loop.run(main())
    return out, large, small


def _yes():
    return Scripted("yes", 1)


def _low():
    return Scripted("unsure", 2, min_score=0.1)


def _plain(answers):
    return {a.query_id: (a.text, a.status, a.trail.route) for a in answers}


def _finished(log):
    return [p.answer for p in log.past.values() if p.answer is not None]


def _whole(folder):
    out, _, _ = _go(RunLog(folder, HEADER), queries(5))
    return _plain(out), (folder / "run.jsonl").read_bytes()


# ---- resume ----------------------------------------------------------------------------------------------------------
def test_the_lines_of_a_run(tmp_path):
    whole, data = _whole(tmp_path)
    records = [decode_line(line) for line in data.splitlines(keepends=True)]
    assert records[0]["run"]["settings"] == {"tau": 0.98}
    answers = [r["answer"] for r in records if "answer" in r]
    assert len(answers) == 5 and {a["query_id"] for a in answers} == set(whole)
    assert [r["step"]["phase"] for r in records if r.get("id") == "q3" and "step" in r] == ["judge", "draft", "loop", "loop"]
    assert list(read_log(tmp_path)) == records
    # Each line is whole JSON for anybody's reader.
    assert all(json.loads(line)["crc"] for line in data.splitlines())


def _records(disk):
    return [decode_line(line) for line in bytes(disk.files["/run/run.jsonl"]).splitlines(keepends=True)]


def test_cut_at_every_byte_the_union_is_the_whole():
    disk = FaultyDisk()
    whole = _plain(_go(RunLog(Path("/run"), HEADER, disk=disk), queries(4))[0])
    data = bytes(disk.files["/run/run.jsonl"])
    lines = data.splitlines(keepends=True)
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    for cut in range(len(data) + 1):
        disk = FaultyDisk()
        disk.files["/run/run.jsonl"] = bytearray(data[:cut])
        log = RunLog(Path("/run"), HEADER, disk=disk)
        kept, boundary = sum(end <= cut for end in ends), cut in (0, *ends)
        assert ("/run/run.torn" in disk.files) != boundary
        assert sum(len(p.steps) + (p.answer is not None) for p in log.past.values()) == max(kept - 1, 0)
        if not boundary and cut % 97:  # a run for every boundary, and for some cuts within a line
            continue
        before = {i: [s.phase for s in p.steps] for i, p in log.past.items() if p.answer is None}
        done = _finished(log)
        out, large, small = _go(log, queries(4))
        assert {**_plain(done), **_plain(out)} == whole and not set(_plain(done)) & set(_plain(out))
        asked = [(c.request.affinity, phase_of(c.request)) for e in (large, small) for c in e.calls]
        assert not [(i, p) for i, phases in before.items() for p in phases if p != "loop" and (i, p) in asked]
        assert not {i for i, _ in asked} & set(_plain(done))
        assert sorted(r["answer"]["query_id"] for r in _records(disk) if "answer" in r) == sorted(whole)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), crashes=st.integers(1, 4), fault=st.sampled_from(["none", "full", "short", "sync"]))
def test_a_disk_that_forgets_scrambles_and_refuses(seed, crashes, fault):
    rng = random.Random(seed)
    disk, handed = FaultyDisk(), []
    for _ in range(crashes):
        log = RunLog(Path("/run"), HEADER, disk=disk)
        known = _plain(_finished(log))
        # What was handed out in any earlier life is still there: nothing is lost, nothing is answered twice.
        assert all(known[a.query_id] == _plain([a])[a.query_id] for a in handed)
        if fault in ("full", "short"):
            disk.room, disk.short = rng.randrange(2500), fault == "short"
        stop = rng.randint(1, 5)
        if fault == "sync":
            count = rng.randint(0, 3)
            original, calls = FaultyDisk.sync, [0]

            def sync(handle, disk=disk, count=count, calls=calls, original=original):
                calls[0] += 1
                disk.sync_fails = calls[0] > count
                return original(disk, handle)

            disk.sync = sync
        try:
            out, _, _ = _go(log, queries(5), stop_after=stop)
        except RunLogError as error:
            assert "run ends" in str(error) and fault != "none"
            out = []
            # An answer that was handed out before the fault is safe: the loop above saw it.
        handed += [a for a in out if a.query_id not in {h.query_id for h in handed}]
        disk.__dict__.pop("sync", None)
        disk.crash(rng)
    log = RunLog(Path("/run"), HEADER, disk=disk)
    done = _plain(_finished(log))
    assert all(a.query_id in done for a in handed)
    out, _, _ = _go(log, queries(5))
    assert set(done) | set(_plain(out)) == {f"q{i}" for i in range(5)}
    assert not set(done) & set(_plain(out))


def test_nothing_is_appended_behind_a_fault():
    disk = FaultyDisk()
    log = RunLog(Path("/run"), HEADER, disk=disk)
    disk.room, disk.short = 10, True
    with pytest.raises(RunLogError, match="10 of"):
        log.write("step", "a", None, {"phase": "judge"})
    disk.room = None
    size = len(disk.files["/run/run.jsonl"])
    with pytest.raises(RunLogError, match="run ends here"):
        log.write("step", "b", None, {"phase": "judge"})
    assert len(disk.files["/run/run.jsonl"]) == size


def test_a_failed_sync_ends_the_run_and_hands_nothing_out():
    disk = FaultyDisk()
    log = RunLog(Path("/run"), HEADER, disk=disk)
    disk.sync_fails = True
    with pytest.raises(RunLogError, match="cannot be synced"):
        _go(log, queries(3))
    disk.sync_fails = False  # the system says it only once
    with pytest.raises(RunLogError):
        log.write("step", "b", None, {"phase": "judge"})


def test_answers_of_one_moment_share_one_sync():
    disk = FaultyDisk()
    log = RunLog(Path("/run"), HEADER, disk=disk)
    before = disk.syncs

    async def one(i):
        log.write("step", f"q{i}", None, {"phase": "judge"})
        await log.commit()
        assert disk.safe["/run/run.jsonl"].count(b'"step"') >= 1

    async def main():
        await asyncio.gather(*(one(i) for i in range(50)))

    virtual_loop.run(main())
    assert disk.syncs - before <= 2 and disk.safe["/run/run.jsonl"].count(b'"step"') == 50


def test_who_waits_for_a_sync_may_be_cancelled():
    disk = FaultyDisk()
    log = RunLog(Path("/run"), HEADER, disk=disk)

    async def main():
        log.write("step", "a", None, {"phase": "judge"})
        first, second = asyncio.ensure_future(log.commit()), asyncio.ensure_future(log.commit())
        await asyncio.sleep(0)
        first.cancel()
        await second
        await log.aclose()

    virtual_loop.run(main())


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_another_run_is_refused_and_named(tmp_path):
    _whole(tmp_path)
    with pytest.raises(ResumeRefused, match=r"settings: tau: was 0.98, is 0.9.*force-new"):
        RunLog(tmp_path, {**HEADER, "settings": {"tau": 0.9}})
    log = RunLog(tmp_path, {**HEADER, "settings": {"tau": 0.9}}, force_new=True)
    assert log.past == {} and (tmp_path / "run.1.jsonl").exists()
    asyncio.run(log.aclose())


def test_the_same_id_with_another_content_is_refused(tmp_path):
    _whole(tmp_path)
    with pytest.raises(ResumeRefused, match="'q1' has another content"):
        _go(RunLog(tmp_path, HEADER), [Query("question 0", id="q0"), Query("another question", id="q1")])


def test_one_process_a_folder(tmp_path):
    log = RunLog(tmp_path, HEADER)
    with pytest.raises(RunLogError, match="another process is writing"):
        RunLog(tmp_path, HEADER)
    asyncio.run(log.aclose())
    asyncio.run(RunLog(tmp_path, HEADER).aclose())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunLogError, match="run.jsonl"):
        RunLog(tmp_path / "file" / "run", HEADER)


def test_a_scrambled_digit_is_noticed():
    line = encode_line({"id": "a", "step": {"phase": "judge", "output_tokens": 1}})
    assert decode_line(line)["step"]["output_tokens"] == 1
    for i in range(len(line)):
        with pytest.raises(ValueError):
            decode_line(line[:i] + bytes([line[i] ^ 1]) + line[i + 1 :])


def test_pictures_are_safe_before_their_line(tmp_path):
    events = []

    class Watched(Disk):
        def sync(self, handle):
            events.append("sync")
            super().sync(handle)

        def write(self, handle, data):
            events.append("write")
            return super().write(handle, data)

    log = RunLog(tmp_path, HEADER, disk=Watched())
    events.clear()

    async def main():
        name = await log.save_picture(Picture(Image.new("RGB", (9, 4), (1, 2, 3))))
        assert events == ["sync"]
        log.write("step", "a", None, {"phase": "loop", "picture": name})
        await log.aclose()
        return name

    name = asyncio.run(main())
    assert Picture(tmp_path / name).size == (9, 4) and name.startswith("pictures/")


# ---- a real process --------------------------------------------------------------------------------------------------
CHILD = """
import sys, asyncio
sys.path.insert(0, {tests!r})
from funnel_cases import Loop, engines, queries
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.runlog import RunLog
from speceyes_kernels.orchestrator.settings import FunnelSettings

async def main():
    large, small = engines(judge_s=0.01, draft_s=0.02, loop_s=0.02, large=2, small=2)
    log = RunLog({folder!r}, {{"n": 1}})
    settings = FunnelSettings(in_flight=4)
    async with Funnel(large, small, settings=settings, agent=Loop(), log=log) as funnel:
        async for answer in funnel.run(queries(60)):
            print(answer.query_id, flush=True)
    await log.aclose()

asyncio.run(main())
"""


def test_killed_in_the_middle_and_resumed(tmp_path):
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    handed: list[str] = []
    for wanted in (5, 25):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        seen = []
        for line in child.stdout:
            seen.append(line.strip())
            if len(seen) == wanted:
                os.kill(child.pid, signal.SIGKILL)
                break
        seen += [line.strip() for line in child.stdout]
        assert child.wait() == -signal.SIGKILL
        assert not set(seen) & set(handed)  # what was answered is not answered again
        handed += seen
        logged = [r["answer"]["query_id"] for r in read_log(tmp_path) if "answer" in r]
        assert set(handed) <= set(logged) and len(set(logged)) == len(logged)
        handed = logged
    began = time.monotonic()
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert sorted(handed + child.stdout.split()) == sorted(q.id for q in queries(60))
    assert time.monotonic() - began < 120
