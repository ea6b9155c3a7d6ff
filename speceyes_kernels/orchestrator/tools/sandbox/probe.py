"""The self-test, run inside by the sandbox's own process: what should be impossible is tried. Standard library only.

Every line that comes back names something that worked although it must not. Part of it runs before the system call filter
is put on, so that each layer is tried without the ones behind it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_SHOWN = {"dev", "lib", "lib64", "usr", "sandbox", "tmp"}  # and the first folders of the library paths


_LIMITS = {
    "RLIMIT_AS": "memory_bytes",
    "RLIMIT_CPU": "cpu_s",
    "RLIMIT_NPROC": "processes",
    "RLIMIT_FSIZE": "folder_bytes",
    "RLIMIT_NOFILE": "descriptors",
    "RLIMIT_CORE": None,
    "RLIMIT_MEMLOCK": None,
    "RLIMIT_MSGQUEUE": None,
}


def before_filter(settings: dict[str, Any]) -> Iterator[str]:
    """Everything but the filter is on."""
    yield from _files(settings)
    yield from _network(settings["probe"])
    yield from _kernel_objects(settings["probe"])
    yield from _limits(settings)
    yield from _process()
    yield from _threads(settings["processes"])


def _files(settings: dict[str, Any]) -> Iterator[str]:
    shown = _SHOWN | {folder.split("/")[1] for folder in (*settings["libraries"], os.__file__, __file__)}
    extra = {*os.listdir("/"), *os.listdir("/..")} - shown
    if extra:
        yield f"files: / shows {', '.join(sorted(extra))}"
    for path in (settings["probe"]["canary"], "/etc/passwd", "/proc/self/status", "/sys/kernel"):
        try:
            os.stat(path)
            yield f"files: {path} can be reached"
        except OSError:
            pass
    for folder in ("/", os.path.dirname(os.__file__), *settings["libraries"]):
        flags = os.statvfs(folder).f_flag
        if not flags & os.ST_RDONLY or not flags & os.ST_NOSUID or not flags & os.ST_NODEV:
            yield f"files: {folder} is mounted with flags {flags:#x}: not read-only, nosuid and nodev"
        path = os.path.join(folder, "speceyes_probe")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os.unlink(path)
            yield f"files: {folder} can be written"
        except OSError:
            pass
    own = os.statvfs(".")
    if own.f_blocks * own.f_frsize > settings["folder_bytes"] + 65536:
        yield f"files: the folder holds {own.f_blocks * own.f_frsize} bytes"
    if settings["way"] != "bubblewrap" and own.f_files > settings["files"]:  # bwrap sets no number
        yield f"files: the folder holds {own.f_files} files"


def _network(probe: dict[str, Any]) -> Iterator[str]:
    places: list[tuple[str, int, Any]] = [
        ("the host's TCP port", socket.AF_INET, ("127.0.0.1", probe["port"])),
        ("the host's abstract Unix socket", socket.AF_UNIX, "\0" + probe["abstract"]),
        ("the host's Unix socket", socket.AF_UNIX, probe["unix"]),
    ]
    for what, family, address in places:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(1)
                connection.connect(address)
            yield f"network: {what} can be reached"
        except OSError:
            pass
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        yield f"network: interfaces {', '.join(names)}"


def _kernel_objects(probe: dict[str, Any]) -> Iterator[str]:
    if os.getpid() != 1:
        yield f"processes: this is process {os.getpid()}, not the first of its own namespace"
    if os.uname().nodename != probe["hostname"]:
        yield "names: the host's name is seen"
    ipc_stat, buffer = 2, ctypes.create_string_buffer(512)
    if probe["queue"] is not None and _libc.msgctl(probe["queue"], ipc_stat, buffer) == 0:
        yield "IPC: the host's message queue can be reached"


def _limits(settings: dict[str, Any]) -> Iterator[str]:
    for name, setting in _LIMITS.items():
        value = settings[setting] if setting else 0
        if resource.getrlimit(getattr(resource, name)) != (value, value):
            yield f"limits: {name} is {resource.getrlimit(getattr(resource, name))}, not {value}"


def _process() -> Iterator[str]:
    for fd in range(1024):
        try:
            os.fstat(fd)
        except OSError:
            continue
        if fd > 3:
            yield f"descriptors: {fd} was inherited"
    get_death_signal, get_no_new_privileges = 2, 39
    signal_number = ctypes.c_int()
    _libc.prctl(get_death_signal, ctypes.byref(signal_number), 0, 0, 0)
    if signal_number.value != signal.SIGKILL:
        yield "end: it would outlive its launcher"
    if _libc.prctl(get_no_new_privileges, 0, 0, 0, 0) != 1:
        yield "privileges: new ones can be had"
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if _libc.capget(header, sets) != 0 or any(sets):
        yield f"privileges: capabilities {[hex(word) for word in sets]}"
    if os.getuid() == 0:
        yield "privileges: uid 0"
    left = sorted(set(os.environ) - {"HOME", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"})
    if left:
        yield f"environment: {', '.join(left)}"


def _threads(most: int) -> Iterator[str]:
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(most):
            started.append(threading.Thread(target=end.wait))
            started[-1].start()
        yield f"limits: {most + 1} threads run; root's uid is not bound by the limit of {most}"
    except RuntimeError:
        started.pop()
    end.set()
    for thread in started:
        thread.join()


def behind_filter() -> Iterator[str]:
    """The filter is on as well: refused calls, and a thread that must still start."""
    calls: dict[str, tuple[Any, ...]] = {
        "fork": (),
        "unshare": (0x10000000,),
        "mount": (b"none", b"/sandbox", b"tmpfs", 0, None),
        "ptrace": (16, 1, 0, 0),
        "socket": (1, 1, 0),
        "socketpair": (1, 1, 0, (ctypes.c_int * 2)()),
        "memfd_create": (b"x", 0),
        "process_vm_readv": (1, None, 0, None, 0, 0),
    }
    for name, given in calls.items():
        ctypes.set_errno(0)
        result = getattr(_libc, name)(*given)
        if name == "fork" and result == 0:
            os._exit(0)
        if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            yield f"filter: {name} is let through (errno {ctypes.get_errno()})"
    try:
        os.execve("/nonexistent", ["x"], {})
    except OSError as problem:
        if problem.errno != errno.EPERM:
            yield "filter: execve is let through"
    if _libc.prctl(1, 0, 0, 0, 0) == 0:
        yield "filter: the signal at the launcher's death can be taken off"
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
