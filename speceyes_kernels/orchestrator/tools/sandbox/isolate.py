"""The sandbox's launcher: isolates itself, forks the process that runs the code, watches it. Standard library only.

Run by the host as a script of its own interpreter, so nothing of the host's memory is in it. Every step either works or
raises: a launcher that cannot isolate reports why and runs nothing. Three ways, chosen by the host:

- ``root``: the file view is built as root in a new mount namespace, then the process becomes an unprivileged uid of its
  own (process limits do not bind the kernel's uid 0, not even inside a user namespace), then enters new user, pid,
  network, IPC and UTS namespaces. The mount namespace stays root's: no capability inside reaches it.
- ``user``: the user namespace first, for hosts that are not root.
- ``bubblewrap``: ``bwrap`` makes the namespaces, where they are allowed to it only (bubblewrap.py).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
if __package__ in (None, ""):  # a script of ``python -I``: its siblings are not on the path
    sys.path.insert(0, _HERE)
    import bubblewrap
    import child
else:  # pragma: no cover - read by the type checker and the tests
    from . import bubblewrap, child

_libc = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = _NEW_UTS | _NEW_IPC | _NEW_USER | _NEW_PIDS | _NEW_NETWORK
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("null", "zero", "urandom")
# Above the ranges that systemd and the container engines hand out, below 2^31; one for each launcher (pids are unique),
# so that sandboxes side by side share no uid and no count of processes.
_FIRST_UID = 0x70000000

# Exit statuses that the host explains; 128 + n is signal n.
EXIT_CPU, EXIT_TIME, EXIT_HOST_GONE, EXIT_REFUSED = 250, 251, 252, 253


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int, what: str) -> None:
    """``unshare(2)``; OSError naming the namespaces."""
    _check(_libc.unshare(flags), f"new {what} namespace")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """``mount(2)``."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _check(
        _libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()),
        f"mount {source or kind or ''} on {target}",
    )


def _pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root: its number on {os.uname().machine} is not known")
    _check(_libc.syscall(number, new.encode(), old.encode()), "pivot_root")


# ---- the file view ---------------------------------------------------------------------------------------------------


def libraries(settings: dict[str, Any]) -> list[str]:
    """The folders that the view shows read-only: system libraries, this Python's, the host's packages; outermost only."""
    wanted = [*_SYSTEM_LIBRARIES, *child.python_folders(), *settings["libraries"]]
    real = sorted({os.path.realpath(folder) for folder in wanted if os.path.isdir(folder)}, key=len)
    kept: list[str] = []
    for folder in real:
        if folder == "/" or (folder + "/").startswith(child.FOLDER + "/"):
            raise OSError(errno.EINVAL, f"a library folder is {folder}: it would show the whole disk, or be hidden")
        if not any(folder.startswith(outer + "/") for outer in kept):
            kept.append(folder)
    return kept


def links(settings: dict[str, Any], shown: list[str]) -> list[tuple[str, str]]:
    """(path, real path) of the wanted folders that are reached through symbolic links, as ``/lib`` often is."""
    wanted = {*_SYSTEM_LIBRARIES, *child.python_folders(), *settings["libraries"]}
    pairs = [(folder, os.path.realpath(folder)) for folder in sorted(wanted) if os.path.isdir(folder)]
    inside = tuple(folder + "/" for folder in shown)
    return [(path, real) for path, real in pairs if path != real and not (path + "/").startswith(inside)]


def _bind_read_only(source: str, target: str) -> None:
    try:
        mount(source, target, None, _BIND)
    except OSError as problem:
        home = f"{problem}. An unprivileged uid must be able to reach {source.removeprefix('/old')}; a Python inside root's"
        raise OSError(problem.errno, f"{home} home does for a root host only") from None
    held = os.statvfs(target).f_flag & (_NO_SUID | _NO_DEVICES | _NO_EXEC)
    times = {1024: 1024, 2048: 2048, 4096: 1 << 21}  # ST_NOATIME, ST_NODIRATIME, ST_RELATIME to MS_*: may be locked
    held |= sum(flag for bit, flag in times.items() if os.statvfs(target).f_flag & bit)
    mount(None, target, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | held)


def build_view(settings: dict[str, Any], uid: int) -> None:
    """Leave the disk: a read-only root of library folders and three devices, and the sandbox's own folder."""
    shown, linked = libraries(settings), links(settings, libraries(settings))
    mount(None, "/", None, _RECURSIVE | _PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=0755,size=1m")
    os.chdir("/tmp")
    os.mkdir("new")
    os.mkdir("old")
    _pivot_root(".", "old")
    os.chdir("/")
    mount("/new", "/new", None, _BIND)
    for folder in shown:
        os.makedirs("/new" + folder, exist_ok=True)
        _bind_read_only("/old" + folder, "/new" + folder)
    for path, real in linked:
        if not os.path.lexists("/new" + path):
            os.makedirs(os.path.dirname("/new" + path), exist_ok=True)
            os.symlink(os.path.relpath(real, os.path.dirname(path)), "/new" + path)
    os.mkdir("/new/dev")
    for device in _DEVICES:
        os.close(os.open(f"/new/dev/{device}", os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/old/dev/{device}", f"/new/dev/{device}", None, _BIND)
    folder = "/new" + child.FOLDER
    os.mkdir(folder)
    if not os.path.lexists("/new/tmp"):
        os.symlink(child.FOLDER[1:], "/new/tmp")
    size, files = settings["folder_bytes"], settings["files"]
    owner = f"mode=0700,uid={uid},gid={uid},size={size},nr_inodes={files}"
    mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, owner)
    mount(None, "/new", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir("/new")
    _pivot_root(".", ".")
    _check(_libc.umount2(b".", _DETACH), "umount the old root")
    os.chdir("/")


# ---- the uid and the namespaces --------------------------------------------------------------------------------------


def own_uid() -> int:
    """An unprivileged uid that no other sandbox has, within the ids that this user namespace maps."""
    with open("/proc/self/uid_map") as file:
        return uid_within([(int(row.split()[0]), int(row.split()[2])) for row in file], os.getpid())


def uid_within(ranges: list[tuple[int, int]], pid: int) -> int:
    """``_FIRST_UID + pid`` where it is mapped, else one of the last 4,096 of the highest range; never 0."""
    wanted = _FIRST_UID + pid
    if any(first <= wanted < first + count for first, count in ranges):
        return wanted
    first, count = max(ranges)
    first, count = (1, count - 1) if first == 0 else (first, count)
    if count < 1:
        raise OSError(errno.EPERM, "the only uid mapped here is root's: no unprivileged uid to become")
    return first + count - 1 - pid % min(4096, count)


def become(uid: int) -> None:
    """Become an unprivileged user without groups, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def check_unprivileged() -> None:
    """Raise unless every id is unprivileged and no group is left."""
    if 0 in {*os.getresuid(), *os.getresgid()} or os.getgroups():
        raise OSError(errno.EPERM, f"still privileged: uids {os.getresuid()}, gids {os.getresgid()}, {os.getgroups()}")


def enter_root(settings: dict[str, Any]) -> None:
    """Way ``root``."""
    uid = own_uid()
    unshare(_NEW_MOUNTS, "mount")
    build_view(settings, uid)
    become(uid)
    check_unprivileged()
    unshare(NAMESPACES, "user, pid, network, IPC and UTS")


def enter_user(settings: dict[str, Any]) -> None:
    """Way ``user``; of a root host too, which first becomes an unprivileged uid."""
    if os.geteuid() == 0:
        become(own_uid())
        check_unprivileged()
        set_dumpable = 4  # else /proc/self stays root's after the change of uid
        _check(_libc.prctl(set_dumpable, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    uid, gid = os.geteuid(), os.getegid()
    unshare(NAMESPACES | _NEW_MOUNTS, "user, mount, pid, network, IPC and UTS")
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    build_view(settings, 1000)


def _run_inside(settings: dict[str, Any], alive: int) -> None:
    _check(_libc.sethostname(child.HOSTNAME.encode(), len(child.HOSTNAME)), "sethostname")
    child.main(settings, alive)


def _run_bubblewrap(settings: dict[str, Any], alive: int) -> None:
    if os.geteuid() == 0:
        become(own_uid())
        check_unprivileged()
    shown = libraries(settings)
    bubblewrap.execute(settings, shown, links(settings, shown), alive)


WAYS = {"root": (enter_root, _run_inside), "user": (enter_user, _run_inside), "bubblewrap": (None, _run_bubblewrap)}


# ---- launching and watching ------------------------------------------------------------------------------------------


def launch(settings: dict[str, Any]) -> int:
    """Isolate, fork, watch; the exit status for the host."""
    enter, run = WAYS[settings["way"]]
    try:
        if enter is not None:
            enter(settings)
    except Exception as problem:
        child.refuse(str(getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}"))
        return EXIT_REFUSED
    alive, held = os.pipe()  # the write end stays with the launcher: the child sees it close
    pid = os.fork()
    if pid == 0:
        try:
            os.close(held)
            run(settings, alive)
        except BaseException as problem:
            child.refuse(f"{type(problem).__name__}: {problem}")
        finally:
            os._exit(EXIT_REFUSED)
    os.close(alive)
    return watch(pid, settings)


def watch(pid: int, settings: dict[str, Any]) -> int:
    """Wait for the child; kill it when the host is gone or the session's time is over."""
    poll, deadline, ended = select.poll(), time.monotonic() + settings["session_s"], 0
    poll.register(0, 0)  # no input is asked for: only its end is reported
    process = os.pidfd_open(pid)
    poll.register(process, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0, left) * 1000)}
        if process in ready:
            break
        if not ready and left > 0:
            continue
        ended = EXIT_HOST_GONE if ready else EXIT_TIME
        os.kill(pid, signal.SIGKILL)
        break
    _, status, usage = os.wait4(pid, 0)
    if ended:
        return ended
    if os.WIFSIGNALED(status):
        used_up = usage.ru_utime + usage.ru_stime >= settings["cpu_s"] - 0.5
        return EXIT_CPU if os.WTERMSIG(status) == signal.SIGKILL and used_up else 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def main() -> None:
    """Entry of the script: settings as JSON in the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the host, whose closing pipe ends this
    os._exit(launch(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
