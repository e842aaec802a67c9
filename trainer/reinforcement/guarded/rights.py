"""Rights that a guarded process gives up for good before it runs untrusted code. The kernel enforces this.

limit           rlimits: memory, no file written, few files open
filter_calls    seccomp: no network, no program started, no file changed, no signal sent
hide_files      Landlock: only files that Python needs can be read; without Landlock, no file can be opened
become_nobody   a process of root becomes the user nobody

Standard library only: untrusted code finds in memory what this module imports.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from contract.processes import end_with_parent

LIBC = ctypes.CDLL(None, use_errno=True)
NOBODY = 65534
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 38, 22, 4
FILTER = 2
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, ARGUMENT = 0, 4, 16  # offsets in seccomp_data
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# From this number on, calls have the same numbers on all machines. Libraries work without unknown ones, such as clone3.
NEWER = 424
OF_NEWER = (436, 439, 444, 445, 446, 449, 454, 455, 456)  # close_range, faccessat2, Landlock, futexes
OWNERS_OF_SIGNALS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: let a descriptor signal other processes
OWNERS_OF_SOCKETS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP


@dataclass(frozen=True)
class Calls:
    """Numbers of system calls on a machine type."""

    machine: int
    refused: tuple[int, ...]
    own: tuple[int, ...]  # allowed if their first argument is 0, which means the process itself
    open: tuple[tuple[int, int], ...]  # with the number of the argument that has the flags
    clone: int
    fcntl: int
    ioctl: int
    last: tuple[int, ...]  # refused when all rights have been given up


MACHINES = {
    "x86_64": Calls(
        machine=0xC000003E,
        refused=(
            *(41, 42, 43, 44, 46, 49, 50, 53, 288, 307),  # sockets
            *(57, 58, 59, 322, 109, 112),  # fork, vfork, execve, execveat, setpgid, setsid
            *(62, 200, 234, 297, 129, 141, 251),  # signals, priorities
            *(101, 310, 311, 321, 298, 272, 308, 312, 256, 279),  # other processes' memory, bpf, perf, namespaces
            *(76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 161, 165, 166, 155),  # files
            *(188, 189, 190, 197, 198, 199, 235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 285, 316, 303, 304),
            *(248, 249, 250, 319, 323, 300),  # keys, memfd, userfaultfd, fanotify
            *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 242, 243, 244, 245),  # shared memory, queues
        ),
        own=(302, 203, 142, 144, 314),  # prlimit64, sched_set...
        open=((2, 1), (257, 2)),  # open, openat
        clone=56,
        fcntl=72,
        ioctl=16,
        last=(157, 317),  # prctl, seccomp
    ),
    "aarch64": Calls(
        machine=0xC00000B7,
        refused=(
            *(198, 199, 200, 201, 202, 203, 206, 211, 242, 269),
            *(221, 281, 154, 157),
            *(129, 130, 131, 240, 138, 140, 30),
            *(117, 270, 271, 280, 241, 97, 268, 272, 238, 239),
            *(33, 34, 35, 36, 37, 38, 276, 45, 46, 47, 48, 51, 52, 53, 54, 55, 88, 40, 39, 41),
            *(5, 6, 7, 14, 15, 16, 264, 265),
            *(217, 218, 219, 279, 282, 285, 262),
            *(194, 195, 196, 186, 187, 188, 189, 190, 191, 192, 193, 180, 181, 182, 183, 184, 185),
        ),
        own=(261, 122, 118, 119, 274),
        open=((56, 2),),
        clone=220,
        fcntl=25,
        ioctl=29,
        last=(167, 277),
    ),
}
# Landlock's calls, and the file accesses that it can restrict, by its version.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILES = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
OF_PYTHON = "/usr/lib /usr/lib64 /usr/local/lib /lib /lib64 /usr/share/zoneinfo /etc/ld.so.cache /etc/localtime "
OF_PYTHON += "/dev/null /dev/zero /dev/urandom /dev/random /proc/cpuinfo /proc/meminfo /sys/devices/system/cpu"

Line = tuple[int, int, int, int]


def limit(memory_gb: float) -> None:
    memory = int(memory_gb * 2**30)
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))


def filter_calls() -> None:
    """Refuse calls that change anything outside this process, or that reach another process."""
    calls = MACHINES[platform.machine()]
    for arguments in ((PR_SET_DUMPABLE, 0, 0, 0, 0), (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)):
        _require(LIBC.prctl(*arguments), "prctl")
    lines = [*_refused(calls.refused), *_newer()]
    for number in calls.own:
        lines += _of_argument(number, 0, [(EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)])
    for number, argument in calls.open:
        lines += _of_argument(number, argument, [(ANY_SET, 0, 1, WRITING), (RETURN, 0, 0, REFUSE)])
    for number, values in ((calls.fcntl, OWNERS_OF_SIGNALS), (calls.ioctl, OWNERS_OF_SOCKETS)):
        for value in values:
            lines += _of_argument(number, 1, [(EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE)])
    lines += _of_argument(calls.clone, 0, [(ANY_SET, 1, 0, CLONE_THREAD), (RETURN, 0, 0, REFUSE)])
    _install(lines)


def hide_files(root: Path) -> None:
    """Allow reading only Python's files from now on. `root` is on Python's path, but is hidden too."""
    version = _call(CREATE_RULESET, None, 0, 1)
    if version < 1:
        _install(_refused(number for number, _ in MACHINES[platform.machine()].open))
        return
    files = FILES[min(version, len(FILES) - 1)]
    # From version 6 on, Landlock can also refuse signals and abstract sockets to other processes.
    attributes = struct.pack("QQQ", files, 0, 3 if version >= 6 else 0)[: 24 if version >= 6 else 8]
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    _require(ruleset, "landlock")
    for path in {*sys.path, *OF_PYTHON.split()} - {"", str(root)}:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it does not exist
            continue
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        _require(_call(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0), f"landlock: {path}")
        os.close(place)
    _require(_call(RESTRICT_SELF, ruleset, 0), "landlock")
    os.close(ruleset)


def become_nobody(parent: int) -> None:
    """Become the user nobody, if this process is root's, and refuse to change the rights again."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    end_with_parent()  # set again: the kernel resets it when the user changes
    if os.getppid() != parent:
        os._exit(1)
    _install(_refused(MACHINES[platform.machine()].last))


def _refused(numbers: Iterable[int]) -> Iterator[Line]:
    for number in numbers:
        yield EQUAL, 0, 1, number
        yield RETURN, 0, 0, REFUSE


def _newer() -> list[Line]:
    """Instructions that report newer calls of the kernel as unknown, except those in use."""
    allowed = [(EQUAL, len(OF_NEWER) - place, 0, number) for place, number in enumerate(OF_NEWER)]
    return [(AT_LEAST, 0, len(allowed) + 1, NEWER), *allowed, (RETURN, 0, 0, UNKNOWN)]


def _of_argument(number: int, argument: int, rule: list[Line]) -> list[Line]:
    """Instructions that apply a rule to one argument of a call. Afterwards the call's number is loaded again."""
    inside = [(LOAD, 0, 0, ARGUMENT + 8 * argument), *rule, (LOAD, 0, 0, NUMBER)]
    return [(EQUAL, 0, len(inside), number), *inside]


def _install(lines: Iterable[Line]) -> None:
    """Make the kernel run these BPF instructions at every system call."""
    machine = MACHINES[platform.machine()].machine
    whole = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if platform.machine() == "x86_64":  # in the x32 interface, numbers mean other calls
        whole += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    whole += [*lines, (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in whole))
    header = struct.pack("HxxxxxxP", len(whole), ctypes.addressof(program))
    _require(LIBC.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(header), 0, 0), "seccomp")


def _call(number: int, *arguments: int | bytes | None) -> int:
    values = (number, *arguments)
    return LIBC.syscall(*(ctypes.c_long(value) if isinstance(value, int) else value for value in values))


def _require(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
