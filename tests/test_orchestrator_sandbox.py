"""The code sandbox against hostile code, each available way; where a way is not available, that it refuses."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
from sandbox_support import (
    LIMITS,
    WAYS,
    attempt,
    attempts,
    call,
    processes_of,
    refuses,
    sandbox,
    tried,
)

from speceyes_kernels.orchestrator.tools.sandbox import host

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

# ---- ordinary code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_code_prints_reads_its_picture_and_returns_one(way: str, tmp_path: Path) -> None:
    async def main() -> None:
        box = sandbox(way, LIMITS)
        if await refuses(box, tmp_path):
            return
        picture = host.Pixels(3, 2, bytes(range(18)))
        code = (
            "from PIL import Image\nimage = Image.open('a.png')\nprint(image.size)\nimage.transpose(0).save('b.png')\n"
            "open('note.txt', 'w').write('no picture')"
        )
        output = await box.run(code, {"a.png": picture})
        mirrored = bytes([6, 7, 8, 3, 4, 5, 0, 1, 2, 15, 16, 17, 12, 13, 14, 9, 10, 11])
        assert output == host.Output("(3, 2)\n", (host.Pixels(3, 2, mirrored),))

    call(main)


@pytest.mark.parametrize("way", WAYS)
def test_variables_stay_within_a_session_and_nothing_passes_between_sessions(way: str, tmp_path: Path) -> None:
    async def main() -> None:
        box = sandbox(way, LIMITS)
        if await refuses(box, tmp_path):
            return
        first, second = await box.open(), await box.open()
        try:
            assert (await first.run("x = 41; open('f', 'w').write('secret')")).error is None
            failed = await first.run("x += 1\nraise KeyError('no')")
            assert failed.error is not None and "line 2" in failed.error and "KeyError: 'no'" in failed.error
            assert not failed.ended and "child.py" not in failed.error
            assert (await first.run("print(x, __name__)")).text == "42 __main__\n"
            other = await second.run(tried("x\nopen('f')"))
            assert other.text == "NameError\nFileNotFoundError\n"
        finally:
            await first.aclose()
            await second.aclose()
        assert (await first.run("print(1)")) == host.Output("", error="the session is over", ended=True)

    call(main)


@pytest.mark.parametrize("way", WAYS)
def test_many_side_by_side_have_all_their_threads(way: str, tmp_path: Path) -> None:
    """Sandboxes share no count of processes: each gets its 7 threads while the others hold theirs."""
    code = (
        "import threading, time\nend = threading.Event()\nthreads = [threading.Thread(target=end.wait) for _ in range(7)]\n"
        "for t in threads: t.start()\ntime.sleep(1)\nprint(len(threads))\nend.set()"
    )

    async def main() -> None:
        box = sandbox(way, LIMITS)
        if await refuses(box, tmp_path):
            return
        outputs: list[host.Output] = []

        async def one() -> None:
            outputs.append(await box.run(code))

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(one)
        assert outputs == [host.Output("7\n")] * 6

    call(main)


# ---- hostile code ----------------------------------------------------------------------------------------------------


FORBIDDEN = [  # statements, the errors they may end in
    ("os.fork()\nos.forkpty()\nos.posix_spawn('/bin/true', ['true'], {})", {"PermissionError", "FileNotFoundError", "OSError"}),
    ("__import__('subprocess').run(['/bin/true'])\nos.execv('/bin/sh', ['sh'])", {"PermissionError"}),
    ("__import__('multiprocessing').Process(target=print).start()", {"PermissionError"}),
    ("open('/etc/passwd')\nos.listdir('/proc')\nos.listdir('/home')\nopen('/../etc/shadow')", {"FileNotFoundError"}),
    ("open('/dev/mem')\nopen('/dev/sda')\nopen('/dev/kmsg')\nopen('/dev/fd/0')", {"FileNotFoundError"}),
    ("os.mknod('/sandbox/disk', 0o60666, 0x800)\nos.chroot('.')\nos.setuid(0)\nos.nice(-5)", {"PermissionError"}),
    ("socket.socket()\nsocket.socket(type=socket.SOCK_DGRAM)\nsocket.socket(socket.AF_UNIX)", {"PermissionError"}),
    ("socket.socketpair()\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", {"PermissionError"}),
    ("socket.create_connection(('127.0.0.1', 22))\nsocket.getaddrinfo('localhost', 80)", {"PermissionError", "gaierror"}),
    ("bytearray(10 << 30)\nbytes(10 << 30)", {"MemoryError"}),
    ("os.open('/lib/x', os.O_CREAT | os.O_WRONLY)\nopen('/x', 'w')\nos.remove(os.__file__)", {"OSError"}),
    ("os.kill(2, 9)\nos.pidfd_open(1)\nos.sched_setaffinity(0, [0])", {"ProcessLookupError", "PermissionError"}),
    ("os.memfd_create('x')\nos.setns(0)\nos.unshare(0x10000000)", {"PermissionError", "AttributeError"}),
    ("__import__('resource').setrlimit(9, (-1, -1))\n__import__('resource').setrlimit(6, (9999, 9999))", {"ValueError", "PermissionError"}),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_forbidden_calls_fail(way: str, tmp_path: Path) -> None:
    """A Python error for each, in one process: none of them ends it or leaves something behind for the next."""
    outputs = attempts(way, tmp_path, [tried(statements) for statements, _ in FORBIDDEN], one_session=True)
    for output, (statements, errors) in zip(outputs or [], FORBIDDEN, strict=outputs is not None):
        got = output.text.split()
        assert output.error is None and set(got) <= errors and len(got) == len(statements.splitlines()), statements


@pytest.mark.parametrize("way", WAYS)
def test_ptrace_of_the_first_process(way: str, tmp_path: Path) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())"
    )
    output = attempt(way, tmp_path, code)
    assert output is None or output.text == "-1 1\n"


@pytest.mark.parametrize("way", WAYS)
def test_another_architectures_calls_end_it(way: str, tmp_path: Path) -> None:
    """getpid by x86_64's x32 numbers: the filter must not read them as its own."""
    if os.uname().machine != "x86_64":
        pytest.skip("x32 numbers exist on x86_64 only")
    output = attempt(way, tmp_path, "import ctypes\nprint(1)\nctypes.CDLL(None).syscall(0x40000000 | 39)\nprint(2)")
    assert output is None or (output.text == "1\n" and output.error == "ended: signal 31 ended it" and output.ended)


@pytest.mark.parametrize("way", WAYS)
def test_thread_bomb(way: str, tmp_path: Path) -> None:
    code = """
import threading
end, count = threading.Event(), 0
try:
    while count < 1000:
        threading.Thread(target=end.wait, daemon=True).start()
        count += 1
except RuntimeError:
    print(count)
end.set()
"""
    output = attempt(way, tmp_path, code)
    assert output is None or output.text == f"{LIMITS.threads - 1}\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", ["while True: pass", "import time\nprint('a')\nwhile True: time.sleep(1)"])
def test_endless_loop_ends_at_its_time(way: str, code: str, tmp_path: Path) -> None:
    limits = host.Limits(wall_s=1.5, cpu_s=60, memory_bytes=1 << 30)
    started = time.monotonic()
    output = attempt(way, tmp_path, code, limits)
    if output is not None:
        assert output.error == "ended: it ran longer than 1.5 s" and output.ended
        assert output.text == ("a\n" if "'a'" in code else "")  # what was printed before is kept
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("way", WAYS)
def test_cpu_time_ends_it_also_on_two_threads(way: str, tmp_path: Path) -> None:
    code = "import threading, zlib\ndef f():\n    while True: zlib.compress(bytes(1 << 20))\nthreading.Thread(target=f).start()\nf()"
    output = attempt(way, tmp_path, code, host.Limits(wall_s=60, cpu_s=2, memory_bytes=1 << 30))
    if output is not None:
        assert output.ended and output.error in ("ended: it used more than 2 s of CPU time", "ended: signal 9 ended it")
        assert way == "bubblewrap" or "CPU" in output.error


@pytest.mark.parametrize("way", WAYS)
def test_ten_gigabytes_of_file(way: str, tmp_path: Path) -> None:
    code = f"""
import errno, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = 0
for name in range(20):
    try:
        with open(str(name), 'wb', buffering=0) as file:
            while size < {10 << 30}:
                size += file.write(bytes(1 << 20))
    except OSError as e:
        print(errno.errorcode[e.errno])
print(size <= {LIMITS.folder_bytes})
"""
    output = attempt(way, tmp_path, code)
    assert output is None or (
        output.text.endswith("True\n") and set(output.text.split()) <= {"EFBIG", "ENOSPC", "True"}
    )


@pytest.mark.parametrize("way", WAYS)
def test_output_flood(way: str, tmp_path: Path) -> None:
    limits = host.Limits(wall_s=20, output_bytes=100_000, memory_bytes=1 << 30)
    output = attempt(way, tmp_path, "while True: print('x' * 999)", limits)
    if output is not None:
        assert output.error == "ended: it printed more than 100000 bytes" and output.ended
        assert output.text == ("x" * 999 + "\n") * 100


@pytest.mark.parametrize("way", WAYS)
def test_symbolic_links_lead_nowhere_outside(way: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    code = tried(
        f"os.symlink({str(secret)!r}, 'a.png')\nopen('a.png')\nos.symlink('/', 'root.d')\nos.listdir('root.d/etc')"
    )
    output = attempt(way, tmp_path, code)
    assert output is None or (output.text.split() == ["got", "FileNotFoundError"] * 2 and output.pictures == ())


FORGED = [
    (b"R" + struct.pack("<I", 30) + b"cos\nsystem\n(S'touch /x'\ntR.   ", "its reply is no JSON"),
    (b"R" + struct.pack("<I", 4) + b"[[1]", "its reply is no JSON"),
    (b"R" + struct.pack("<I", 3) + b"[1]", "its reply is no JSON object"),
    (b"R" + struct.pack("<I", 1 << 31), "its reply holds a frame b'R' of 2147483648 bytes"),
    (b"\x80" + struct.pack("<I", 4) + b"abcd", "its reply holds a frame b'\\x80' of 4 bytes"),
    (b"P" + struct.pack("<III", 11, 2, 1) + b"abc", "it returned 3 bytes as a picture of 2 x 1"),
    (b"P" + struct.pack("<III", 0xFFFFFFF0, 65536, 65536), "it returned more than 4 pictures of 64000000 pixels"),
    (b"P" + struct.pack("<III", 8, 0, 0), "it returned more than 4 pictures of 64000000 pixels"),
    ((b"P" + struct.pack("<III", 11, 1, 1) + b"abc") * 5, "it returned more than 4 pictures of 64000000 pixels"),
]


@pytest.mark.parametrize("way", WAYS)
def test_forged_replies_are_refused(way: str, tmp_path: Path) -> None:
    """The code writes to the reply's descriptor itself: a pickle, bad JSON, wrong lengths, too many pictures."""
    outputs = attempts(way, tmp_path, [f"import os\nos.write(3, {forged!r})" for forged, _ in FORGED])
    assert outputs is None or [(o.error, o.ended) for o in outputs] == [(f"ended: {p}", True) for _, p in FORGED]


ENDS = [
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("import sys\nsys.stdout.close()\nraise ValueError('x')", "ValueError: x"),
    ("class E(Exception):\n    def __str__(self): raise KeyError\nraise E", "E"),
    ("def f(): f()\nf()", "RecursionError"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("x = (", "SyntaxError"),
    ("x = '\\0' + chr(0)\nexec('a b')", "SyntaxError"),
    ("import os\nos._exit(7)", "ended: it ended with status 7"),
    ("import os\nos.close(3)", "ended: "),
    ("import ctypes\nctypes.string_at(0)", "ended: signal 11 ended it"),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_end_has_its_reason(way: str, tmp_path: Path) -> None:
    outputs = attempts(way, tmp_path, [code for code, _ in ENDS])
    for output, (code, error) in zip(outputs or [], ENDS, strict=outputs is not None):
        assert output.error is not None and error in output.error, code
        assert output.ended == error.startswith("ended"), code


# ---- nothing leaks, nothing stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_descriptors_environment_and_memory_of_the_host_are_not_there(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECEYES_SECRET", "in the environment")
    with open(tmp_path / "leak", "w") as leak, socket.socket() as connection:
        for fd in (leak.fileno(), connection.fileno()):
            os.set_inheritable(fd, True)
        code = "import os\nfound = []\nfor fd in range(256):\n    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\n"
        output = attempt(way, tmp_path, code + "print(found, sorted(os.environ))")
    assert output is None or output.text == "[0, 1, 2, 3] ['HOME', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS']\n"


@pytest.mark.parametrize("way", WAYS)
def test_no_process_is_left_after_a_timeout_a_cancel_and_a_close(way: str, tmp_path: Path) -> None:
    """Also of code that ignores every signal and tries to stay as a daemon."""
    code = "import os, signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    code += "try: os.setsid()\nexcept OSError: pass\nprint('on')\nwhile True: time.sleep(1)"

    async def main() -> None:
        box = sandbox(way, host.Limits(wall_s=3, memory_bytes=1 << 30))
        if await refuses(box, tmp_path):
            return
        launchers = []
        timed_out = await box.open()
        launchers.append(timed_out._process.pid)
        assert (await timed_out.run(code)).text == "on\n"
        cancelled = await box.open()
        launchers.append(cancelled._process.pid)
        with anyio.move_on_after(1):
            await cancelled.run(code)
        closed = await box.open()
        launchers.append(closed._process.pid)
        await closed.run("x = 1")
        assert len(processes_of(closed._process.pid)) >= 2
        await closed.aclose()
        for _ in range(100):
            if not any(processes_of(launcher) for launcher in launchers):
                return
            await anyio.sleep(0.05)
        raise AssertionError({launcher: processes_of(launcher) for launcher in launchers})

    call(main)


@pytest.mark.parametrize("way", WAYS)
def test_the_hosts_death_ends_it(way: str, tmp_path: Path) -> None:
    """A host killed by SIGKILL closes nothing itself: the launcher must see the pipe's end and kill the code."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import anyio
from sandbox_support import sandbox
async def main():
    box = sandbox({way!r})
    try:
        session = await box.open()
    except Exception:
        print("refused", flush=True)
        return
    print(session._process.pid, flush=True)
    await session.run("while True: pass")
anyio.run(main)
"""
    root = str(Path(host.__file__).parents[4])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        if line == "refused":
            return
        time.sleep(0.5)
        assert len(processes_of(int(line))) >= 2
        child.kill()
    for _ in range(100):
        if not processes_of(int(line)):
            return
        time.sleep(0.05)
    raise AssertionError(processes_of(int(line)))
