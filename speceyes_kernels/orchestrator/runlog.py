"""The run log: one checked JSON line per finished phase, answer and audit; an interrupted run resumes from it.

``run.jsonl`` begins with a header line. Every line ends in the CRC-32 of what stands before it, so that a line that the
disk scrambled is as unreadable as one that was cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .disk import Disk
from .errors import ResumeRefused, RunLogError
from .images import Picture
from .settings import AgentSettings, WordingSettings
from .types import Answer, Step

logger = logging.getLogger("speceyes_kernels.orchestrator")

LOG, TORN, PICTURES = "run.jsonl", "run.torn", "pictures"
FORMAT = 1
#: Header fields that may differ between a run and its continuation.
_FREE = ("versions",)


@dataclass
class Past:
    """What an earlier run left of one query."""

    content: str | None
    steps: list[Step] = field(default_factory=list)
    answer: Answer | None = None
    audit: Mapping[str, Any] | None = None


def encode_line(record: Mapping[str, Any]) -> bytes:
    """The record as a line with its check."""
    body = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))[:-1].encode()
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def decode_line(line: bytes) -> dict[str, Any]:
    """
    Raises
    ------
    ValueError
        Cut, scrambled, or never a line of a run log.
    """
    body, mark, check = line.rpartition(b',"crc":"')
    if not mark or check != b'%08x"}\n' % zlib.crc32(body):
        raise ValueError("the line's check does not fit")
    return json.loads(body + b"}")


def _log_of(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_file() else path / LOG


def read_log(path: str | Path) -> Iterator[dict[str, Any]]:
    """The readable records of a run folder or log file, header first; for reports, without a lock."""
    with open(_log_of(path), "rb") as file:
        for line in file:
            try:
                yield decode_line(line)
            except ValueError:
                return


@dataclass
class Logged:
    """What a log says of one query: the content that it had, its answer, its audit."""

    content: str | None
    answer: Answer | None = None
    audit: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Finished:
    """A log as reports need it. ``cut``: number of its last line where that is incomplete, as an interrupted run
    leaves it; else 0."""

    header: Mapping[str, Any]
    queries: Mapping[str, Logged]
    cut: int


class LogDamaged(RunLogError, ValueError):
    """A log that reports cannot be made of; the message names file and line."""


def read_finished(folder: str | Path) -> Finished:
    """All answers and audits of a run folder or log file; for reports, without a lock.

    Raises
    ------
    LogDamaged
        No log, no header, or a line that cannot be read and is not the last.
    """
    path = _log_of(folder)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise LogDamaged(f"{path}: cannot be read: {error.strerror}; expected a folder of `speceyes run`") from error
    header: Mapping[str, Any] | None = None
    queries: dict[str, Logged] = {}
    cut = 0
    for number, line in enumerate(lines, 1):
        try:
            record = decode_line(line)
            if header is None:
                header = record["run"]
                continue
            entry = queries.setdefault(record["id"], Logged(record["content"]))
            if "answer" in record:
                entry.answer = Answer.from_json(record["answer"])
            elif "audit" in record:
                entry.audit = record["audit"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) > 1:
                cut = number
                break
            raise LogDamaged(
                f"{path}, line {number}: damaged ({error}); the run's own command moves it aside and goes on from there"
            ) from error
    if header is None:
        raise LogDamaged(f"{path}: empty")
    return Finished(header, queries, cut)


class RunLog:
    """A run's folder, locked by this process.

    Parameters
    ----------
    folder : path
        Made when it is missing.
    header : mapping
        What the run is: settings, models, data. A folder that holds another run is refused.
    force_new : bool
        Moves an earlier run's log aside instead of going on with it.

    Attributes
    ----------
    past : dict of str to Past
        What an earlier run left, by query id.

    Raises
    ------
    RunLogError
        The folder is in use, or the disk refuses.
    ResumeRefused
        The folder holds another run.
    """

    def __init__(
        self, folder: str | Path, header: Mapping[str, Any], *, force_new: bool = False, disk: Disk | None = None
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOG
        self.past: dict[str, Past] = {}
        self._disk = disk or Disk()
        self._written = self._synced = 0  # lines
        self._syncing: asyncio.Task[None] | None = None
        self._broken: RunLogError | None = None
        self._pictures: set[str] = set()
        head = json.loads(json.dumps({"format": FORMAT, **header}, allow_nan=False))
        self._handle: int | None = None
        try:
            self._disk.make_folder(self.folder)
            self._handle = self._open(force_new)
            self._resume(head)
        except OSError as error:
            self._release()
            raise RunLogError(f"{self.path}: {error.strerror or error}") from error
        except BaseException:
            self._release()
            raise

    def _open(self, force_new: bool) -> int:
        handle = self._disk.open_append(self.path)
        try:
            self._disk.lock(handle, self.path)
            if force_new and self._disk.read(self.path):
                number = 1
                while self._disk.exists(aside := self.folder / f"run.{number}.jsonl"):
                    number += 1
                self._disk.rename(self.path, aside)
                logger.warning("%s: the earlier run is kept as %s", self.path, aside.name)
                old, handle = handle, self._disk.open_append(self.path)
                self._disk.close(old)
                self._disk.lock(handle, self.path)
            self._disk.sync_folder(self.folder)
        except BaseException:
            self._disk.close(handle)
            raise
        return handle

    def _resume(self, head: dict[str, Any]) -> None:
        assert self._handle is not None
        data = self._disk.read(self.path)
        good, first = 0, True
        for line in data.splitlines(keepends=True):
            try:
                record = decode_line(line)
                if first:
                    self._check_header(record, head)
                else:
                    self._remember(record)
            except ResumeRefused:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning(
                    "%s: unreadable from byte %d of %d on (%s): moved to %s; what it held is done again",
                    self.path, good, len(data), error, TORN,
                )  # fmt: skip
                break
            good, first = good + len(line), False
        if good < len(data):
            self._move_torn(data[good:], good)
        if good == 0:
            self.write("run", None, None, head)
            self._disk.sync(self._handle)
            self._synced = self._written

    def _move_torn(self, data: bytes, good: int) -> None:
        assert self._handle is not None
        torn = self._disk.open_append(self.folder / TORN)
        try:
            if self._disk.write(torn, data) != len(data):
                raise RunLogError(f"{self.folder / TORN}: written in part only; is the disk full?")
            self._disk.sync(torn)
        finally:
            self._disk.close(torn)
        self._disk.sync_folder(self.folder)
        self._disk.truncate(self._handle, good)
        self._disk.sync(self._handle)

    def _check_header(self, record: dict[str, Any], head: dict[str, Any]) -> None:
        old, head = _completed(record["run"]), _completed(head)
        for key in sorted({*old, *head} - set(_FREE)):
            if old.get(key) != head.get(key):
                raise ResumeRefused(
                    f"{self.path} holds another run: {key}: {_difference(old.get(key), head.get(key))}; give another "
                    "folder, the same settings, or --force-new"
                )
        for key in _FREE:
            if old.get(key) != head.get(key):
                logger.warning("%s: %s: %s", self.path, key, _difference(old.get(key), head.get(key)))

    def _remember(self, record: dict[str, Any]) -> None:
        past = self.past.setdefault(record["id"], Past(record["content"]))
        if "step" in record:
            past.steps.append(Step.from_json(record["step"]))
        elif "answer" in record:
            past.answer = Answer.from_json(record["answer"])
        elif "audit" in record:
            past.audit = record["audit"]
        else:
            raise ValueError("neither a step nor an answer nor an audit")

    def check_content(self, query_id: str, content: str | None) -> None:
        """
        Raises
        ------
        ResumeRefused
            The earlier run knew this id with another content.
        """
        past = self.past.get(query_id)
        if past is not None and past.content != content:
            raise ResumeRefused(
                f"{self.path}: query {query_id!r} has another content than in the run that is resumed; give another "
                "folder or --force-new"
            )

    def write(self, kind: str, query_id: str | None, content: str | None, data: Mapping[str, Any]) -> None:
        """Appends one line, by one write; :meth:`commit` says when it is safe.

        Raises
        ------
        RunLogError
            The disk refused, now or earlier: nothing is appended behind a fault.
        """
        self._check()
        record = {kind: data} if query_id is None else {"id": query_id, "content": content, kind: data}
        line = encode_line(record)
        assert self._handle is not None
        try:
            count = self._disk.write(self._handle, line)
        except OSError as error:
            raise self._break(f"cannot be written: {error.strerror or error}") from error
        if count != len(line):
            raise self._break(f"{count} of {len(line)} bytes were written; is the disk full?")
        self._written += 1

    async def commit(self) -> None:
        """Returns once every line written before the call is on the disk; calls share one fsync, in a thread."""
        wanted = self._written
        while self._synced < wanted:
            self._check()
            if self._syncing is None:
                # A task of its own: who waits may be cancelled, the others' fsync goes on.
                self._syncing = asyncio.get_running_loop().create_task(self._sync())
            await asyncio.shield(self._syncing)
        self._check()

    async def _sync(self) -> None:
        upto, handle = self._written, self._handle
        try:
            if handle is None:
                raise OSError("the log was closed")
            await asyncio.to_thread(self._disk.sync, handle)
            self._synced = upto
        except OSError as error:
            # The kernel may have dropped the pages and say so only once: trying again would lie.
            self._break(f"cannot be synced: {error.strerror or error}")
        finally:
            self._syncing = None

    async def save_picture(self, picture: Picture) -> str:
        """Puts a picture into the run folder, safe on the disk; its name there, for a step."""

        def save() -> str:
            image = picture.open()
            name = f"{picture.hash[:32]}.png"
            if name not in self._pictures:
                folder = self.folder / PICTURES
                folder.mkdir(exist_ok=True)
                part = folder / f".{name}.part"
                with open(part, "wb") as file:
                    image.save(file, "PNG", compress_level=1)
                    file.flush()
                    self._disk.sync(file.fileno())
                part.replace(folder / name)
                self._disk.sync_folder(folder)
                self._disk.sync_folder(self.folder)
                self._pictures.add(name)
            return f"{PICTURES}/{name}"

        self._check()
        try:
            return await asyncio.to_thread(save)
        except OSError as error:
            raise self._break(f"a picture cannot be written: {error.strerror or error}") from error

    @property
    def broken(self) -> RunLogError | None:
        """The fault after which nothing is written any more."""
        return self._broken

    def _check(self) -> None:
        if self._broken is not None:
            raise RunLogError(str(self._broken)) from self._broken
        if self._handle is None:
            raise RunLogError(f"{self.path}: the log was closed")

    def _break(self, problem: str) -> RunLogError:
        self._broken = RunLogError(f"{self.path}: {problem}; the run ends here and can be resumed")
        return self._broken

    async def aclose(self) -> None:
        """Syncs what was written and unlocks the folder."""
        try:
            if self._handle is not None and self._broken is None:
                await self.commit()
        finally:
            if self._syncing is not None:
                await asyncio.wait([self._syncing])
            self._release()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disk.close(handle)


def _completed(header: Mapping[str, Any]) -> dict[str, Any]:
    """With what headers did not hold at first, when it could not be set: such a run goes on with the defaults."""
    out = dict(header)
    if "agent" in out:
        out.setdefault("loop", AgentSettings().model_dump(mode="json"))
    if isinstance(out.get("settings"), dict) and "mode" in out["settings"]:
        out["settings"] = {"wording": WordingSettings().model_dump(mode="json"), **out["settings"]}
    return out


def _difference(old: Any, new: Any) -> str:
    """Where two header values differ, in words."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return f"{key}: {_difference(old.get(key), new.get(key))}"
    return f"was {json.dumps(old)}, is {json.dumps(new)}"
