"""The system calls that sandboxed code may make: a seccomp filter, standard library only (it runs inside).

A list of what is allowed, so a call that a later kernel brings is refused too. Python, numpy and Pillow run on it. Not on
it: every call that makes a process, runs a file, opens a socket, or reaches namespaces, mounts, other processes, keys, BPF
or io_uring. Refused calls fail with EPERM (ENOSYS for ``clone3``, which makes the C library fall back to ``clone``); a
call by another architecture's numbers ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# name : number on x86_64 : number on aarch64
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222
mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:-
sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup2:33:- pause:34:-
nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 exit:60:93
kill:62:129 uname:63:160 fcntl:72:25 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getcwd:79:17
chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:-
readlink:89:- chmod:90:- fchmod:91:52 umask:95:166 gettimeofday:96:169 getrlimit:97:163 getrusage:98:165
sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 getppid:110:173
getgroups:115:158 getresuid:118:148 getresgid:120:150 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 statfs:137:43 fstatfs:138:44 getpriority:140:141
sched_getparam:143:121 sched_getscheduler:145:120 mlock:149:228 munlock:150:229 arch_prctl:158:- gettid:186:178
readahead:187:213 time:201:- futex:202:98 sched_getaffinity:204:123 getdents64:217:61 set_tid_address:218:96
restart_syscall:219:128 fadvise64:221:223 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 tgkill:234:131 openat:257:56 mkdirat:258:34
newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36 readlinkat:267:78
fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99 get_robust_list:274:100
utimensat:280:88 epoll_pwait:281:22 timerfd_create:283:85 fallocate:285:47 timerfd_settime:286:86
timerfd_gettime:287:87 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 prlimit64:302:261
getcpu:309:168 renameat2:316:276 getrandom:318:278 membarrier:324:283 copy_file_range:326:285 statx:332:291
rseq:334:293 close_range:436:436 faccessat2:439:439
"""
_ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # AUDIT_ARCH_*, column above
_CLONE, _CLONE3, _PRCTL = {1: 56, 2: 220}, 435, {1: 157, 2: 167}

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments: their low halves
_X32 = 0x40000000
_THREAD = 0x00010000 | 0x00000100 | 0x00000800  # CLONE_THREAD, CLONE_VM, CLONE_SIGHAND
_NAMESPACES = 0x7E020000 | 0x00000080  # CLONE_NEW*
# PR_SET_NAME, PR_GET_NAME, and the name of a mapping (PR_SET_VMA): C libraries use them.
_PRCTLS = (15, 16, 0x53564D41)


def allowed(column: int) -> dict[str, int]:
    """Names and numbers of the calls allowed on an architecture (column 1: x86_64, 2: aarch64)."""
    rows = (row.split(":") for row in _ALLOWED.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def program(machine: str | None = None) -> bytes:
    """The filter as classic BPF instructions (``struct sock_filter``, 8 bytes each).

    Parameters
    ----------
    machine : str, optional
        ``"x86_64"`` or ``"aarch64"``; default this machine's.

    Raises
    ------
    OSError
        No filter is written for the architecture.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"no system call filter for {machine}; there is one for {', '.join(_ARCHITECTURES)}"
        )
    architecture, column = _ARCHITECTURES[machine]
    denied = _ERRNO | errno.EPERM
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [  # clone: threads only
        (_EQUAL, 0, 5, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_AND, 0, 0, _THREAD | _NAMESPACES),
        (_EQUAL, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, denied),
    ]
    code += [(_EQUAL, 0, 3 + len(_PRCTLS), _PRCTL[column]), (_LOAD, 0, 0, _ARGUMENT)]
    code += [(_EQUAL, len(_PRCTLS) - i, 0, option) for i, option in enumerate(_PRCTLS)]
    code += [(_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    numbers = sorted(set(allowed(column).values()))
    for number in numbers:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, denied))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install() -> None:
    """Put the filter on the calling process, for good. Needs ``no_new_privs``; OSError when the kernel refuses."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    filter_ = Filter(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    set_seccomp, mode_filter = 22, 2
    if libc.prctl(set_seccomp, mode_filter, ctypes.byref(filter_), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"system call filter: {os.strerror(number)}")
