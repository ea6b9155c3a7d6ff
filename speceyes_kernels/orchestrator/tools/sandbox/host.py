"""Running code that nobody has read: the host's side of the sandbox.

The code runs in a process of its own that sees no network, no disk but Python's libraries (read-only) and a folder of its
own, no other process, and nothing of this process's memory, environment or descriptors; with limits on memory, CPU time,
threads, files and output, killed when its time is over or the host ends. Before the first use a self-test tries to break
out; where anything succeeds, or no isolation can be had, no code is run at all. It is no defence against faults of the
kernel: code of hostile users belongs in a virtual machine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from .child import HOSTNAME
from .session import Ended, Limits, Output, Pixels, Session

__all__ = ["Limits", "Output", "Pixels", "Sandbox", "SandboxUnavailable", "Session"]

_LAUNCHER = str(Path(__file__).with_name("isolate.py"))
_WAYS = ("root", "user", "bubblewrap")
_START_S = 60.0


class SandboxUnavailable(RuntimeError):
    """No isolation works on this machine, so no code is run; the message names what each way lacks."""


def package_folders() -> list[str]:
    """This interpreter's site-packages, and the folders that numpy and Pillow are in where that is another."""
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"]]
    for name in ("numpy", "PIL"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


class Sandbox:
    """Isolated processes for code.

    Parameters
    ----------
    limits : Limits, optional
    libraries : sequence of str, optional
        Folders of packages that the code may import, shown read-only. Default: `package_folders`.
    ways : sequence of str
        Ways of isolation in the order in which they are tried: ``"root"``, ``"user"``, ``"bubblewrap"``.
    python : str
        Interpreter of the sandbox.

    Notes
    -----
    Linux on x86_64 or aarch64. Nothing is tried before `check` or the first `open`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        libraries: Sequence[str] | None = None,
        ways: Sequence[str] = _WAYS,
        python: str = sys.executable,
    ) -> None:
        unknown = [way for way in ways if way not in _WAYS]
        if unknown or not ways:
            raise ValueError(f"ways is {list(ways)!r}; expected some of {', '.join(_WAYS)}")
        self.limits = limits or Limits()
        self.libraries = package_folders() if libraries is None else list(dict.fromkeys(libraries))
        self.ways = tuple(ways)
        self.python = python
        self.way: str | None = None
        self._launcher = _LAUNCHER
        self._problem: str | None = None
        self._lock: anyio.Lock | None = None

    async def check(self) -> str:
        """Find a way that isolates; the self-test runs once.

        Returns
        -------
        str
            The way.

        Raises
        ------
        SandboxUnavailable
            Nothing isolates here, with what each way lacks.
        """
        if self._lock is None:
            self._lock = anyio.Lock()
        async with self._lock:
            if self.way is None and self._problem is None:
                problems = []
                for way in self.ways:
                    problem = await self._probe(way)
                    if problem is None:
                        self.way = way
                        break
                    problems.append(f"{way}: {problem}")
                else:
                    self._problem = "; ".join(problems)
        if self.way is None:
            raise SandboxUnavailable(f"no code is run: {self._problem}")
        return self.way

    async def open(self) -> Session:
        """Start an isolated process and wait until it takes code.

        Raises
        ------
        SandboxUnavailable
            As `check`, and when this process could not be isolated.
        """
        way = await self.check()
        session = await self._start(way)
        problem: str | None = f"it did not start within {_START_S:g} s"
        try:
            with anyio.move_on_after(_START_S):
                await session.result()
                problem = None
        except Ended as end:
            problem = str(end)
        finally:
            if problem is not None:
                await session.aclose()
        if problem is not None:
            raise SandboxUnavailable(f"no code is run: {way}: {problem}")
        return session

    async def run(self, code: str, pictures: Mapping[str, Pixels] | None = None) -> Output:
        """Run code in a process of its own.

        Parameters
        ----------
        code : str
        pictures : mapping of str to Pixels, optional
            Pictures to put into its folder, by file name.

        Returns
        -------
        Output

        Raises
        ------
        SandboxUnavailable
            As `check`.
        """
        session = await self.open()
        try:
            return await session.run(code, pictures)
        finally:
            await session.aclose()

    def _settings(self, way: str, probe: dict[str, Any] | None) -> dict[str, Any]:
        given = {name: value for name, value in asdict(self.limits).items() if name != "wall_s"}
        return {
            **given,
            "way": way,
            # The launcher is in the same user namespace and is counted too; bwrap's own process is not.
            "processes": self.limits.threads + (way != "bubblewrap"),
            "libraries": self.libraries,
            "bwrap": shutil.which("bwrap") or "",
            "probe": probe,
        }

    async def _start(self, way: str, probe: dict[str, Any] | None = None) -> Session:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(f"no code is run: the sandbox needs Linux, this is {sys.platform}")
        command = [self.python, "-I", "-S", "-B", self._launcher, json.dumps(self._settings(way, probe))]
        process = await anyio.open_process(command, stderr=-3, env={}, cwd="/", start_new_session=True)
        return Session(process, self.limits)

    async def _probe(self, way: str) -> str | None:
        """What the way lacks; None when nothing."""
        if way == "root" and (os.geteuid() != 0):
            return "this process is not root"
        if way == "bubblewrap" and not shutil.which("bwrap"):
            return "there is no bwrap on the path"
        try:
            with _bait() as bait:
                session = await self._start(way, bait)
                try:
                    with anyio.fail_after(_START_S):
                        result = await session.result()
                finally:
                    await session.aclose()
        except (OSError, TimeoutError, Ended) as problem:
            return str(problem) or type(problem).__name__
        found = result.get("found")
        if not isinstance(found, list):
            return "the self-test gave no result"
        return "the self-test got through: " + "; ".join(map(str, found)) if found else None


@contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """Things of the host that the self-test must not reach: a file, sockets of three kinds, a message queue."""
    abstract = f"speceyes-{uuid.uuid4().hex}"
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.msgget(0, 0o1666) if hasattr(libc, "msgget") else -1
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as named:
        os.chmod(folder, 0o755)
        canary = Path(folder, "canary")
        canary.write_text("secret")
        canary.chmod(0o644)
        with socket.socket(socket.AF_UNIX) as unnamed:
            try:
                tcp.bind(("127.0.0.1", 0))
                named.bind(f"{folder}/socket")
                os.chmod(f"{folder}/socket", 0o777)
                unnamed.bind("\0" + abstract)
                for listener in (tcp, named, unnamed):
                    listener.listen(8)
                yield {
                    "canary": str(canary),
                    "port": tcp.getsockname()[1],
                    "unix": f"{folder}/socket",
                    "abstract": abstract,
                    "queue": queue if queue >= 0 else None,
                    "hostname": HOSTNAME,
                }
            finally:
                if queue >= 0:
                    libc.msgctl(queue, 0, None)  # IPC_RMID
