"""The guarded process itself: gives up its rights, then runs code of others (trainer/reinforcement/guarded/worker.py).

Standard library only: what is imported here is what that code finds in memory.
"""

import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import struct
import sys
from multiprocessing.connection import Connection
from typing import Any

# What programs of models import most, and what sockets import on their own.
AT_HAND = "bisect collections copy datetime decimal encodings.idna fractions functools heapq itertools math operator"
AT_HAND += " random re statistics string typing"
NOBODY = 65534
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 38, 22, 4
FILTER = 2
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
CLONE3 = 435  # libc takes clone for threads where there is none
LOAD, EQUAL, ANY_SET, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, MACHINE, ARGUMENT = 0, 4, 16  # offsets in seccomp_data
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "refused": (
                *(41, 42, 43, 44, 46, 49, 50, 53, 288, 307),  # sockets
                *(57, 58, 59, 322),  # fork, vfork, execve, execveat
                *(62, 200, 234, 297, 129, 424),  # signals
                *(101, 310, 311, 321, 298, 272, 308),  # ptrace, other processes' memory, bpf, perf, namespaces
                *(76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 161, 165, 166, 155, 188, 189, 190),
                *(235, 258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 285, 316, 437, 425, 426, 427, 452),
                *(248, 249, 250, 29, 30, 31, 64, 68, 69, 240, 319, 323),  # keys, shared memory, memfd
            ),
            "open": ((2, 1), (257, 2)),  # open, openat, and which argument has the flags
            "clone": 56,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "refused": (
                *(198, 199, 200, 201, 202, 203, 206, 211, 242, 269),
                *(221, 281, 129, 130, 131, 240, 138, 424, 117, 270, 271, 280, 241, 97, 268),
                *(33, 34, 35, 36, 37, 38, 276, 45, 46, 47, 48, 51, 52, 53, 54, 55, 88, 40, 39, 41, 5, 6, 7, 452),
                *(217, 218, 219, 194, 195, 196, 186, 190, 279, 282, 437, 425, 426, 427, 285),
            ),
            "open": ((56, 2),),
            "clone": 220,
        },
    ),
}


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    asked = json.loads(connection.recv_bytes())
    for name in AT_HAND.split():
        importlib.import_module(name)
    try:
        give_up(asked["memory_gb"])
        judge = _function(asked["source"], asked["name"]) if asked["kind"] == "function" else code
        become_nobody()
    except BaseException as error:
        connection.send_bytes(json.dumps({"refused": _told(error)}).encode())
        return
    connection.send_bytes(json.dumps({"reward": 0.0}).encode())
    while True:
        question = json.loads(connection.recv_bytes())
        try:
            answer = {"reward": float(judge(**question))}
        except BaseException as error:
            answer = {"refused": _told(error)}
        connection.send_bytes(json.dumps(answer).encode())


def _function(source: str, name: str) -> Any:
    found: dict[str, Any] = {"__name__": "reward"}
    exec(compile(source, "reward.py", "exec"), found)
    if not callable(found.get(name)):
        raise NameError(f"{name} is no function of the file")
    return found[name]


def code(prompt: str, answer: str, reference: str) -> float:
    """Share of the checks, a line of Python each, that hold after the program."""
    names: dict[str, Any] = {"__name__": "answer"}
    checks = [line for line in reference.splitlines() if line.strip()]
    exec(compile(_program(answer), "answer.py", "exec"), names)
    held = 0
    for check in checks:
        try:
            exec(compile(check, "check.py", "exec"), names)
            held += 1
        except Exception:  # an assertion, or whatever the program's own code raises
            continue
    return held / max(1, len(checks))


def _program(answer: str) -> str:
    """The program of an answer, without the marks of Markdown around it."""
    if "```" not in answer:
        return answer
    inside = answer.split("```")[1]
    return inside.removeprefix("python").removeprefix("py")


def give_up(memory_gb: float) -> None:
    """Give up every right but to compute and to read. There is no way back."""
    limit = int(memory_gb * 2**30)
    for kind, value in (
        (resource.RLIMIT_AS, limit),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _program_of_kernel()
    for arguments in ((PR_SET_DUMPABLE, 0, 0, 0, 0), (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(header), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def become_nobody() -> None:
    """Leave root's own files to root. Python's may be among them: what is imported later may not be found."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _program_of_kernel() -> bytes:
    """BPF instructions that the kernel runs at every system call."""
    machine, calls = MACHINES[platform.machine()]
    lines: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, machine),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == 0xC000003E:  # numbers of the x32 interface are other calls
        lines += [(0x35, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    lines += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)]
    for number in calls["refused"]:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for number, argument in calls["open"]:
        lines += [
            (EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENT + 8 * argument),
            (ANY_SET, 0, 1, WRITING),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    lines += [
        (EQUAL, 0, 4, calls["clone"]),
        (LOAD, 0, 0, ARGUMENT),
        (ANY_SET, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]


if __name__ == "__main__":
    main(int(sys.argv[1]))
