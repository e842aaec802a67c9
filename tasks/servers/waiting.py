"""Limits of waits: for a server, with a report every 10 s, and for the end of this process after a signal."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from contract.faults import Fault

EVERY = 10.0  # seconds between lines
PAUSE = 0.2


def say(line: str) -> None:
    """Print a line and flush it."""
    print(line, flush=True)


class Wait:
    def __init__(self, what: str, limit: float, log: Path | None = None, say: Callable[[str], None] = say):
        self.what, self.limit, self.log, self._say = what, limit, log, say
        self._began = self._reported = time.monotonic()

    def pause(self) -> None:
        """Sleep for a moment. Raise a Fault after the limit."""
        now = time.monotonic()
        if now - self._began > self.limit:
            raise self.failed(f"not ready after {self.limit:.0f} s")
        if now - self._reported >= EVERY:
            self._reported = now
            self._say(f"{self.what}: {now - self._began:.0f} s (at most {self.limit:.0f})")
        time.sleep(PAUSE)

    def failed(self, reason: str) -> Fault:
        """Return a Fault that ends the wait, with the log and its last line."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log and self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        shown = f"; {last[:200]}" if last else ""
        return Fault(f"{self.what}: {reason}" + (f"; its log: {self.log}{shown}" if self.log else ""))


@contextlib.contextmanager
def limited_end(seconds: float, then: str) -> Iterator[None]:
    """End this process at most `seconds` after SIGTERM or Ctrl-C; the message contains `then`, the next action.

    Otherwise an outage of a server delays the end of a run, as Prefect's client repeats each request for a minute. Call
    it in the main thread of a command.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signalled = threading.Event()

    def watch() -> None:
        while data := os.read(reading, 64):
            if {signal.SIGTERM, signal.SIGINT} & {*data}:
                signalled.set()
                time.sleep(seconds)
                line = f"error: cut off {seconds:.0f} s after the signal: a server does not answer; {then}"
                print(line, file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # independent of the signal's handlers
    threading.Thread(target=watch, daemon=True).start()
    try:
        with no_lost_signals():
            yield
    finally:
        if not signalled.is_set():
            signal.set_wakeup_fd(before)
            os.close(writing)


@contextlib.contextmanager
def no_lost_signals() -> Iterator[None]:
    """Send a signal again if Python ignored the exception of its handler."""
    before, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _send_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat a signal that came in a callback, such as that of a weak reference, in which exceptions are ignored."""
    from prefect.exceptions import TerminationSignal  # takes a second where nothing else has imported it

    if isinstance(error := ignored.exc_value, TerminationSignal | KeyboardInterrupt):
        number = error.signal if isinstance(error, TerminationSignal) else signal.SIGINT
        threading.Timer(PAUSE, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(ignored)
