"""Rights that a guarded process gives up for good before it runs untrusted code. The kernel enforces this.

limit           rlimits: memory, no file written, few files open
filter_calls    seccomp: no network, no program started, no file changed, no signal sent
hide_files      Landlock: only files that Python needs can be read; without Landlock, no file can be opened
become_nobody   a process of root becomes the user nobody

This module imports only the standard library, because untrusted code can use all modules in memory.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
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
    """Numbers of system calls on a machine type, from calls.json."""

    machine: int  # AUDIT_ARCH of the kernel
    refused: dict[str, list[int]]  # by subject
    own: list[int]  # prlimit64 and sched_set...: allowed if the first argument is 0, which means the process itself
    open: list[tuple[int, int]]  # open and openat, with the number of the argument that has the flags
    clone: int
    fcntl: int
    ioctl: int
    last: list[int]  # prctl and seccomp: refused last, after all other rights are given up


MACHINES = {
    name: Calls(**numbers) for name, numbers in json.loads(Path(__file__).with_name("calls.json").read_text()).items()
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
    lines = [*_refused(chain(*calls.refused.values())), *_newer()]
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
    end_with_parent(parent)  # set again: the kernel resets it when the user changes
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
