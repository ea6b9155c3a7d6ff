"""The process inside the sandbox: gives up what it still has, then runs code and answers in frames. Standard library only.

A frame is one byte of kind, four bytes of length (little endian), and the content: ``O`` printed text, ``P`` a picture as
width, height (uint32 each) and RGB bytes, ``R`` a result (JSON), ``X`` a refusal. From the host: ``P`` pictures and ``C``
code (JSON: code, names of the pictures before it). A result says first that the code may come. What is sent is never pickled: the host trusts no byte of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import resource
import select
import signal
import struct
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import probe
    import seccomp
else:  # pragma: no cover
    from . import probe, seccomp

FOLDER = "/sandbox"
HOSTNAME = "sandbox"
_IN, _OUT = 0, 3  # descriptors, after `take_descriptors`
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 1, 2, 38, 39
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_MAX_FRAME = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def python_folders() -> list[str]:
    """Folders of this interpreter's own library."""
    paths = sysconfig.get_paths()
    return [paths["stdlib"], paths["platstdlib"], *(folder for folder in sys.path if folder.endswith("lib-dynload"))]


# ---- frames ----------------------------------------------------------------------------------------------------------


def send(fd: int, kind: bytes, *parts: bytes | memoryview) -> None:
    """Write one frame."""
    for part in (kind + struct.pack("<I", sum(len(part) for part in parts)), *parts):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view[: 1 << 20]) :]


def _read(fd: int, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = os.readv(fd, [view])
        if count == 0:
            raise EOFError
        view = view[count:]
    return content


def receive(fd: int) -> tuple[bytes, bytearray]:
    """Read one frame; EOFError at the end."""
    head = _read(fd, 5)
    size = struct.unpack_from("<I", head, 1)[0]
    if size > _MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes; the most is {_MAX_FRAME}")
    return bytes(head[:1]), _read(fd, size)


def refuse(reason: str) -> None:
    """Tell the host that nothing can be run, from the launcher or before the code."""
    with contextlib.suppress(OSError):  # the host may be gone
        send(_OUT if _taken else 1, b"X", json.dumps({"reason": reason}).encode())


class _Printed(io.RawIOBase):
    """The raw stream under ``sys.stdout``: every write is a frame."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        send(_OUT, b"O", bytes(data))
        return len(data)


# ---- the last steps of isolation -------------------------------------------------------------------------------------

_taken = False


def die_with_launcher(alive: int) -> None:
    """Be killed when the launcher dies; exit when it has died already."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    poll = select.poll()
    poll.register(alive, 0)
    if poll.poll(0):
        os._exit(0)


def take_descriptors() -> None:
    """Requests on 0, replies on 3, the null device on 1 and 2; everything else that was inherited is closed."""
    global _taken
    os.dup2(1, _OUT, inheritable=False)
    _taken = True
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    close_inherited()


def close_inherited() -> None:
    """Close every descriptor above the reply's."""
    os.closerange(_OUT + 1, 1 << 20)


def clear_environment() -> None:
    """Nothing of the host's environment; one thread for the libraries that would start one a core."""
    os.environ.clear()
    os.environ.update(HOME=FOLDER, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")


def limit(settings: dict[str, Any]) -> None:
    """Resource limits: of this process, and as there is no other, of the whole session."""
    values = {
        "RLIMIT_AS": settings["memory_bytes"],
        "RLIMIT_CPU": settings["cpu_s"],
        "RLIMIT_NPROC": settings["processes"],
        "RLIMIT_FSIZE": settings["folder_bytes"],
        "RLIMIT_NOFILE": settings["descriptors"],
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    for name, value in values.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def drop_privileges() -> None:
    """No new privileges, no capability."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    drop_capabilities()


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def filter_calls() -> None:
    """The system call filter."""
    seccomp.install()


# ---- running code ----------------------------------------------------------------------------------------------------


def main(settings: dict[str, Any], alive: int) -> None:
    """Finish the isolation, then answer requests until the host closes its end."""
    die_with_launcher(alive)
    take_descriptors()
    clear_environment()
    os.chdir(FOLDER)
    os.umask(0o077)
    limit(settings)
    drop_privileges()
    package = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != package] + settings["libraries"]
    found = list(probe.before_filter(settings)) if settings["probe"] else []
    filter_calls()
    if settings["probe"]:
        send(_OUT, b"R", json.dumps({"found": [*found, *probe.behind_filter()]}).encode())
    else:
        _serve(settings)


def _serve(settings: dict[str, Any]) -> None:
    sys.stdin = io.StringIO()
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Printed()), "utf-8", "replace", line_buffering=True)
    send(_OUT, b"R", b'{"ready": true}')
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    pictures: list[bytearray] = []
    while True:
        try:
            kind, content = receive(_IN)
        except EOFError:
            return
        if kind == b"P":
            pictures.append(content)
            continue
        request = json.loads(content)
        send(_OUT, b"R", json.dumps(_answer(settings, request, pictures, names)).encode())
        pictures = []


def _answer(
    settings: dict[str, Any], request: dict[str, Any], pictures: list[bytearray], names: dict[str, Any]
) -> dict[str, Any]:
    try:
        for name, pixels in zip(request["pictures"], pictures, strict=True):
            _write_picture(name, pixels)
        names.update(request["names"])
        before = _files()
        exec(compile(request["code"], "<code>", "exec"), names)
    except SystemExit as end:
        if end.code not in (None, 0):
            return {"error": f"SystemExit: {end.code}"}
    except BaseException as problem:
        return {"error": _traceback(problem)}
    finally:
        _flush()
    sent = 0
    for path in _changed(before):
        if sent == settings["pictures"]:
            break
        sent += _send_picture(path, settings["pixels"])
    return {"error": None}


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the code may have closed or replaced it
        sys.stdout.flush()


def _traceback(problem: BaseException) -> str:
    """The traceback without this file's own frames, its end kept when it is long."""
    try:
        frames = problem.__traceback__.tb_next if problem.__traceback__ else None
        return "".join(traceback.format_exception(type(problem), problem, frames))[-4000:]
    except BaseException as second:  # a hostile __str__
        return f"{type(problem).__name__} ({type(second).__name__} while it was described)"


def _write_picture(name: str, pixels: bytearray) -> None:
    from PIL import Image

    width, height = struct.unpack_from("<II", pixels)
    image = Image.frombuffer("RGB", (width, height), bytes(memoryview(pixels)[8:]), "raw", "RGB", 0, 1)
    image.save(os.path.join(FOLDER, name), compress_level=0)


def _files() -> dict[str, tuple[int, int]]:
    found = {}
    for entry in _walk(FOLDER):
        state = entry.stat(follow_symlinks=False)
        found[entry.path] = (state.st_mtime_ns, state.st_size)
    return found


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_file(follow_symlinks=False):
            yield entry
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)


def _changed(before: dict[str, tuple[int, int]]) -> list[str]:
    """Files that are new or changed, oldest first."""
    after = _files()
    return sorted((path for path, state in after.items() if before.get(path) != state), key=lambda path: after[path])


def _send_picture(path: str, pixels: int) -> int:
    """Send a file's pixels when it is a picture of at most ``pixels``; whether it was."""
    try:
        from PIL import Image

        with Image.open(path) as image:
            if image.width * image.height > pixels:
                print(f"{path}: {image.width} x {image.height} pixels are more than the {pixels} that may be returned")
                return 0
            rgb = image.convert("RGB")
        send(_OUT, b"P", struct.pack("<II", *rgb.size), rgb.tobytes())
    except OSError as problem:
        if problem.errno == errno.EPIPE:
            raise
        return 0  # no picture
    except Exception:
        return 0
    return 1


if __name__ == "__main__":  # inside bubblewrap
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
