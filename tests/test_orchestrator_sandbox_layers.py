"""Each step of the sandbox's isolation taken out in turn: the self-test must notice. Refusing; the filter, call by call."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_support import LAUNCHER_FOLDER, LIMITS, WAYS, call, refuses, sandbox

from speceyes_kernels.orchestrator.tools.sandbox import host, isolate, seccomp

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

# (file, text, what it becomes, ways): what is left out of the file
OWN, ALL = ("root", "user"), ("root", "user", "bubblewrap")
MUTANTS = [
    ("isolate.py", "_NEW_UTS | ", "", OWN),
    ("isolate.py", "_NEW_IPC | ", "", OWN),
    ("isolate.py", "_NEW_USER | ", "", OWN),
    ("isolate.py", "_NEW_PIDS | ", "", OWN),
    ("isolate.py", " | _NEW_NETWORK\n", "\n", OWN),
    ("isolate.py", "    build_view(settings, uid)\n", "    os.chdir(child._mutant)\n", ("root",)),
    ("isolate.py", "    become(uid)\n    check_unprivileged()\n", "", ("root",)),
    ("isolate.py", "os.setgroups([])", "os.setgroups([4])", ("root",)),
    ("isolate.py", "    os.setresgid(uid, uid, uid)\n", "", ("root",)),
    ("isolate.py", "_REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | held", "_REMOUNT | _BIND | held", OWN),
    ("isolate.py", '"/new", None, _REMOUNT | _BIND | _READ_ONLY | _NO', '"/new", None, _REMOUNT | _BIND | _NO', OWN),
    ("isolate.py", '    _check(_libc.umount2(b".", _DETACH), "umount the old root")\n', "", OWN),
    ("isolate.py", '    os.chdir("/new")\n    _pivot_root(".", ".")\n', "", OWN),
    ("isolate.py", ",size={size},nr_inodes={files}", ",nr_inodes={files}", OWN),
    ("isolate.py", ",size={size},nr_inodes={files}", ",size={size}", OWN),
    ("isolate.py", "shown, linked = libraries(settings)", "shown, linked = ['/etc', *libraries(settings)]", OWN),
    ("bubblewrap.py", '"--unshare-all"', '"--unshare-all", "--share-net"', ("bubblewrap",)),
    ("bubblewrap.py", '"--unshare-all"', '"--unshare-ipc", "--unshare-uts", "--unshare-net"', ("bubblewrap",)),
    ("bubblewrap.py", '"--unshare-all"', '"--unshare-pid", "--unshare-uts", "--unshare-net"', ("bubblewrap",)),
    ("bubblewrap.py", '["--size", str(settings["folder_bytes"])', '["--size", "99999999999"', ("bubblewrap",)),
    ("bubblewrap.py", '"--remount-ro", "/", ', "", ("bubblewrap",)),
    ("bubblewrap.py", '"--ro-bind", folder', '"--bind", folder', ("bubblewrap",)),
    ("child.py", "    die_with_launcher(alive)\n", "", OWN),  # bwrap does it too
    ("child.py", "    close_inherited()\n", "", OWN),
    ("child.py", "    os.environ.clear()\n", "", OWN),
    *[
        ("child.py", f'        "RLIMIT_{name}": ', f'        "RLIMIT_{name}": 12345 + 0 * ', ALL)
        for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE")
    ],
    ("child.py", "    limit(settings)\n", "", ALL),
    ("child.py", "prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)", "prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)", OWN),
    ("child.py", "    drop_capabilities()\n", "", OWN),
    ("child.py", "    filter_calls()\n", "", ALL),
    ("seccomp.py", "(_EQUAL, 0, 1, _THREAD),", "(_EQUAL, 0, 0, _THREAD),", ALL),
    ("seccomp.py", "(_EQUAL, len(_PRCTLS) - i, 0, option)", "(_EQUAL, 9, 9, option)", ALL),
    *[("seccomp.py", "read:0:63", f"read:0:63 {call}", ALL) for call in (
        "execve:59:221", "socket:41:198", "socketpair:53:199", "memfd_create:319:279", "process_vm_readv:310:270",
    )],
]  # fmt: skip
# Calls such as mount and ptrace would fail without the filter too, for want of the capability: `run` below judges those.


@pytest.fixture
def copy() -> Iterator[Path]:
    """A copy of the sandbox's files that every uid can read."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    for file in LAUNCHER_FOLDER.glob("*.py"):
        shutil.copy(file, folder)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@linux
def test_the_unchanged_copy_passes_its_self_test(copy: Path, tmp_path: Path) -> None:
    """So that what the mutants show is due to them."""

    async def main() -> None:
        for way in ALL:
            box = sandbox(way)
            if not await refuses(box, tmp_path):
                assert await copied(way, copy).check() == way

    call(main)


def copied(way: str, folder: Path) -> host.Sandbox:
    box = sandbox(way)
    box._launcher = str(folder / "isolate.py")
    return box


@linux
@pytest.mark.parametrize(("file", "text", "becomes", "ways"), MUTANTS)
def test_a_missing_step_is_noticed(
    file: str, text: str, becomes: str, ways: tuple[str, ...], copy: Path, tmp_path: Path
) -> None:
    source = (copy / file).read_text()
    assert text in source
    (copy / file).write_text(source.replace(text, becomes))

    async def main() -> None:
        for way in ways:
            if await refuses(sandbox(way), tmp_path):
                continue
            with pytest.raises(host.SandboxUnavailable):
                await copied(way, copy).run("print(1)")

    call(main)


# ---- refusing --------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("way", WAYS)
def test_a_start_that_fails_after_the_self_test_is_refused_too(way: str, tmp_path: Path) -> None:
    """Isolation is no matter of the first time only: a later launcher that cannot isolate runs nothing."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        f"import sys\nsys.path.insert(0, {str(LAUNCHER_FOLDER)!r})\nimport isolate\n"
        "def no(settings, *given): raise OSError(28, 'no room for another namespace')\n"
        "isolate.WAYS = {way: (no, no) for way in isolate.WAYS}\nisolate.main()\n"
    )

    async def main() -> None:
        box = sandbox(way, LIMITS)
        if await refuses(box, tmp_path):
            return
        box._launcher = str(launcher)
        with pytest.raises(host.SandboxUnavailable, match=f"no code is run: {way}: no room for another namespace"):
            await box.run("print(1)")

    call(main)


@linux
def test_where_nothing_isolates_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses every namespace, by a launcher whose system calls fail: all ways fail, each is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        f"import sys\nsys.path.insert(0, {str(LAUNCHER_FOLDER)!r})\nimport isolate\n"
        "def no(*given): raise OSError(1, 'namespaces are forbidden here')\nisolate.unshare = no\nisolate.main()\n"
    )

    async def main() -> None:
        box = host.Sandbox()
        box._launcher = str(launcher)
        with pytest.raises(host.SandboxUnavailable) as refusal:
            await box.run("print(1)")
        text = str(refusal.value)
        assert "user: namespaces are forbidden here" in text and "bubblewrap: there is no bwrap on the path" in text
        assert (
            "root: namespaces are forbidden here" if os.geteuid() == 0 else "root: this process is not root"
        ) in text

    call(main)


@pytest.mark.parametrize(
    ("ranges", "uids"),
    [
        ([(0, 2**32 - 1)], {0x70000000 + 7}),  # the whole of the ids: one of its own
        ([(0, 65536)], {65535 - 7}),  # a container's
        ([(0, 1), (1, 65536)], {65536 - 7}),
        ([(0, 2)], {1}),
        ([(0, 1), (1000, 1)], {1000}),
        ([(5, 3)], {6}),
    ],
)
def test_a_uid_is_found_among_those_that_are_mapped(ranges: list[tuple[int, int]], uids: set[int]) -> None:
    assert isolate.uid_within(ranges, 7) in uids
    for pid in range(1, 9000):
        uid = isolate.uid_within(ranges, pid)
        assert uid != 0 and any(first <= uid < first + count for first, count in ranges)


def test_without_an_unprivileged_uid_it_is_said() -> None:
    with pytest.raises(OSError, match="the only uid mapped here is root's"):
        isolate.uid_within([(0, 1)], 7)


def test_the_folders_of_numpy_and_pillow_are_shown_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numpy")
    folders = host.package_folders()
    assert str(tmp_path) in folders and len(folders) == len(set(folders))
    assert any((Path(folder) / "PIL").is_dir() for folder in folders)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ways is \['docker'\]; expected some of root, user, bubblewrap"):
        host.Sandbox(ways=["docker"])
    with pytest.raises(ValueError, match=r"Limits\.cpu_s is 0; expected a number above 0"):
        host.Limits(cpu_s=0)
    with pytest.raises(ValueError, match="5 bytes for 1 x 2 RGB pixels"):
        host.Pixels(1, 2, bytes(5))


@pytest.mark.parametrize("folder", ["/", "/sandbox/packages"])
def test_a_library_folder_that_shows_the_disk_or_hides_itself_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    with pytest.raises(OSError, match="it would show the whole disk, or be hidden"):
        isolate.libraries({"libraries": [folder]})


# ---- the filter as a program -----------------------------------------------------------------------------------------

KILL, DENIED, NOT_THERE, ALLOWED = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def run(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would answer: an interpreter of the instructions, written from their definition."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    code = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        operation, yes, no, constant = code[at]
        at += 1
        if operation == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        elif operation == 0x54:
            value &= constant
        elif operation == 0x15:
            at += yes if value == constant else no
        elif operation == 0x35:
            at += yes if value >= constant else no
        elif operation == 0x06:
            return constant
        else:
            raise AssertionError(operation)


FORBIDDEN = {
    "x86_64": dict(
        execve=59, execveat=322, fork=57, vfork=58, unshare=272, setns=308, mount=165, umount2=166, pivot_root=155,
        ptrace=101, bpf=321, keyctl=250, add_key=248, io_uring_setup=425, socket=41, connect=42, sendmsg=46, memfd=319,
        process_vm_readv=310, process_vm_writev=311, userfaultfd=323, perf_event_open=298, open_by_handle_at=304,
        setuid=105, setresuid=117, capset=126, seccomp=317, kexec_load=246, init_module=175, mknod=133, chroot=161,
        sethostname=170, clock_settime=227, quotactl=179, personality=135, shmget=29, msgget=68, pidfd_getfd=438,
        open_tree=428, move_mount=429, fsopen=430, mount_setattr=442, vmsplice=278, syslog=103,
    ),
    "aarch64": dict(
        execve=221, execveat=281, unshare=97, setns=268, mount=40, umount2=39, pivot_root=41, ptrace=117, bpf=280,
        keyctl=219, add_key=217, io_uring_setup=425, socket=198, connect=203, sendmsg=211, memfd=279, setresuid=147,
        process_vm_readv=270, process_vm_writev=271, userfaultfd=282, perf_event_open=241, open_by_handle_at=265,
        setuid=146, capset=91, seccomp=277, kexec_load=104, init_module=105, mknodat=33, chroot=51, personality=92,
        shmget=194, msgget=186, open_tree=428, move_mount=429, fsopen=430, mount_setattr=442, vmsplice=75, syslog=116,
    ),
}  # fmt: skip
NUMBERS = {
    "x86_64": (0, 1, 257, 231, 202, 9),
    "aarch64": (63, 64, 56, 94, 98, 222),
}  # read write openat exit_group futex mmap
CLONE = {"x86_64": (56, 157), "aarch64": (220, 167)}  # and prctl
THREAD_FLAGS = 0x3D0F00  # what the C library passes for a thread


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_answers(machine: str) -> None:
    program, architecture = seccomp.program(machine), ARCHITECTURES[machine]
    for number in NUMBERS[machine]:
        assert run(program, architecture, number) == ALLOWED
    for name, number in FORBIDDEN[machine].items():
        assert run(program, architecture, number) == DENIED, name
    for number in range(600, 1000):  # calls of kernels to come
        assert run(program, architecture, number) == DENIED
    assert run(program, architecture, 435) == NOT_THERE
    clone, prctl = CLONE[machine]
    assert run(program, architecture, clone, THREAD_FLAGS) == ALLOWED
    for flags in (0, 17, 0x4111, 0x100, 0x10000, 0x900):  # a process; parts of what a thread needs
        assert run(program, architecture, clone, flags) == DENIED
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        assert run(program, architecture, clone, THREAD_FLAGS | namespace) == DENIED
    assert [run(program, architecture, prctl, option) for option in (15, 16, 0x53564D41)] == [ALLOWED] * 3
    assert {run(program, architecture, prctl, option) for option in range(80) if option not in (15, 16)} == {DENIED}


def test_foreign_architectures_are_killed() -> None:
    i386 = 0x40000003
    for machine, architecture in ARCHITECTURES.items():
        program = seccomp.program(machine)
        for foreign in {i386, *ARCHITECTURES.values()} - {architecture}:
            assert {run(program, foreign, number) for number in range(500)} == {KILL}
    for number in (0, 39, 59, 512, 547):
        assert run(seccomp.program("x86_64"), ARCHITECTURES["x86_64"], 0x40000000 | number) == KILL


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(OSError, match="no system call filter for riscv64; there is one for x86_64, aarch64"):
        seccomp.program("riscv64")
