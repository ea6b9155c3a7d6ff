"""What the sandbox's tests share: a sandbox a way, or the proof that the way refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from speceyes_kernels.orchestrator.tools.sandbox import host

WAYS = ("root", "user", "bubblewrap")
LIMITS = host.Limits(wall_s=20, cpu_s=10, memory_bytes=1 << 30, folder_bytes=64 << 20, threads=8)
LAUNCHER_FOLDER = Path(host.__file__).parent


def reachable_python() -> str:
    """An interpreter of this version that an unprivileged uid can reach; else this one (the sandbox must then refuse)."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin")):
        if python is None:
            continue
        folders = [os.path.realpath(python), *sysconfig.get_paths().values()] if python == sys.executable else [python]
        if os.geteuid() != 0 or all(_open_to_all(folder) for folder in folders):
            return python
    return sys.executable


def _open_to_all(path: str) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in Path(path).parents if parent.exists())


def sandbox(way: str, limits: host.Limits | None = None) -> host.Sandbox:
    """A sandbox of one way."""
    return host.Sandbox(limits, ways=[way], python=sys.executable if way == "root" else reachable_python())


_found: dict[str, tuple[str | None, str | None]] = {}


def call(function: Callable[..., Coroutine[Any, Any, Any]], *given: Any) -> Any:
    """Run a coroutine function."""
    return anyio.run(function, *given)


async def refuses(box: host.Sandbox, tmp_path: Path) -> bool:
    """Whether the sandbox is unavailable; then it is proved that it says why and runs nothing."""
    way = box.ways[0]
    if way in _found:  # the self-test once a way, not once a test
        box.way, box._problem = _found[way]
    try:
        await box.check()
        return False
    except host.SandboxUnavailable as refusal:
        assert str(refusal).startswith(f"no code is run: {box.ways[0]}: ") and len(str(refusal)) > 30
    finally:
        _found[way] = (box.way, box._problem)
    trace = tmp_path / "ran"
    tmp_path.chmod(0o777)
    for attempt in (box.run, box.run):
        with pytest.raises(host.SandboxUnavailable):
            await attempt(f"open({str(trace)!r}, 'w')")
    assert not trace.exists()
    return True


def processes_of(launcher: int) -> list[int]:
    """Living processes that descend from a launcher, or run under its unique uid."""
    rows = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,uid="], capture_output=True, text=True, check=True).stdout
    found: list[int] = []
    for pid, parent, uid in sorted(tuple(map(int, row.split())) for row in rows.splitlines()):
        if pid == launcher or parent in (launcher, *found) or uid == 0x70000000 + launcher:
            found.append(pid)
    return found


def attempts(
    way: str, tmp_path: Path, codes: list[str], limits: host.Limits = LIMITS, one_session: bool = False
) -> list[host.Output] | None:
    """Run snippets, in a process each or in one; None where the way refuses (which is then proved)."""

    async def main() -> list[host.Output] | None:
        box = sandbox(way, limits)
        if await refuses(box, tmp_path):
            return None
        if not one_session:
            return [await box.run(code) for code in codes]
        session = await box.open()
        try:
            return [await session.run(code) for code in codes]
        finally:
            await session.aclose()

    return call(main)


def attempt(way: str, tmp_path: Path, code: str, limits: host.Limits = LIMITS) -> host.Output | None:
    """Run one snippet."""
    outputs = attempts(way, tmp_path, [code], limits)
    return None if outputs is None else outputs[0]


def tried(statements: str) -> str:
    """Code that prints ``got`` for every statement that worked and the error's name for the others."""
    lines = ["import os, socket, ctypes, threading"]
    for statement in statements.strip().splitlines():
        lines += [
            "try:",
            f"    {statement.strip()}",
            "    print('got')",
            "except Exception as e:",
            "    print(type(e).__name__)",
        ]
    return "\n".join(lines)
