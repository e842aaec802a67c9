"""Limits on the time and memory of calls that process untrusted text: templates, grammars.

A call runs in a forked worker and cannot escape its limits: the kernel ends a worker after `seconds` of CPU time, and
refuses it more than `memory` bytes. A keeper process, forked from the caller once, forks a new worker when a worker has
ended. Call start() early to fork the keeper before the caller has threads or uses much memory. Keeper and worker end
with the caller, because their sockets close, and neither holds a file or a lock of the caller.

    calls = LimitedCalls(work, seconds=5, memory=2**29)
    calls(request)      the result of work(request), in types that marshal writes; raises Exceeded beyond a limit

A result may have LENGTH bytes plus TIMES the size of the request, because a caller has many results in memory.
"""

import atexit
import marshal
import math
import os
import pickle
import resource
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from contract.amounts import size

LENGTH, TIMES = 2**18, 16
WAITS = 12.0  # limit of the elapsed time, as a multiple of the CPU time: on a busy host a worker waits for its core


class Exceeded(Exception):
    """A call exceeded a limit. The message is the end of a sentence about the work: "takes more than 5 s"."""


class LimitedCalls:
    """A function with limits, for one call at a time."""

    def __init__(self, work: Callable[[Any], Any], seconds: int, memory: int):
        self.work, self.seconds, self.memory = work, seconds, memory
        self.lock = threading.Lock()
        self.owner = 0  # pid of the process that forked the keeper; a fork of that process needs a keeper too
        self.keeper: socket.socket
        self.worker: Connection
        self.pid = 0

    def start(self) -> None:
        """Fork the keeper, unless this process has one."""
        if self.owner == os.getpid():
            return
        self.lock = threading.Lock()  # another thread may have held it while this process was forked
        self.keeper, far_end = socket.socketpair()
        with warnings.catch_warnings():
            # Python warns of forks in a process with threads. The keeper needs none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            forked = os.fork()
        if not forked:
            _keep(far_end, self.work, self.seconds, self.memory)
        far_end.close()
        self.owner = os.getpid()
        self._next()
        atexit.register(self._end)

    def _end(self) -> None:
        self.keeper.close()
        self.worker.close()

    def __call__(self, request: Any) -> Any:
        self.start()
        with self.lock:
            try:
                self.worker.send_bytes(pickle.dumps(request))
                if not self.worker.poll(WAITS * self.seconds):
                    os.kill(self.pid, signal.SIGKILL)
                    raise TimeoutError
                succeeded, result = marshal.loads(self.worker.recv_bytes())
            except (OSError, EOFError):
                raise Exceeded(self._reason(self._next())) from None
        if succeeded:
            return result
        raise Exceeded(result)

    def _next(self) -> int:
        """Take the next worker from the keeper, and return the signal that ended the previous worker."""
        self.keeper.settimeout(WAITS * self.seconds)
        message, descriptors, *_ = socket.recv_fds(self.keeper, 64, 1)
        if hasattr(self, "worker"):
            self.worker.close()
        self.worker = Connection(descriptors[0])
        self.pid, ended = map(int, message.split())
        return ended

    def _reason(self, ended: int) -> str:
        if ended in (signal.SIGXCPU, signal.SIGKILL):
            return f"takes more than {self.seconds} s"
        return f"ends its process by signal {ended}, as endless nesting does"


def _keep(control: socket.socket, work: Callable[[Any], Any], seconds: int, memory: int) -> NoReturn:
    """Fork a worker, and another when it has ended, until the caller closes the socket."""
    ended = 0
    try:
        _close_files(control.fileno())
        while True:
            worker_end, caller_end = socket.socketpair()
            pid = os.fork()
            if not pid:
                control.close()
                caller_end.close()
                _serve(Connection(worker_end.detach()), work, seconds, memory)
                os._exit(0)
            worker_end.close()
            socket.send_fds(control, [f"{pid} {ended}".encode()], [caller_end.fileno()])
            caller_end.close()
            ended = os.waitpid(pid, 0)[1] & 0x7F
    finally:
        os._exit(0)


def _close_files(control: int) -> None:
    """Close all files except the control socket, and detach from the caller's signals and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.closerange(3, control)
    os.closerange(control + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _serve(calls: Connection, work: Callable[[Any], Any], seconds: int, memory: int) -> None:
    """Answer calls until the caller closes the socket."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            request = calls.recv_bytes()
        except EOFError:
            return
        limit = math.ceil(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            answer = marshal.dumps((True, work(pickle.loads(request))))
            if len(answer) > LENGTH + TIMES * len(request):
                answer = marshal.dumps((False, f"writes {size(len(answer))} for a request of {size(len(request))}"))
        except MemoryError:
            answer = marshal.dumps((False, f"takes more than {size(memory)} of memory"))
        calls.send_bytes(answer)
