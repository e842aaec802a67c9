"""Command-line clients of schedulers: sbatch, squeue, kubectl. They may take long, fail, or be missing.

Result = run(command, text)      once, with text on its standard input
Polled(n, query)                 members of a gang, whose state a thread queries repeatedly: no caller waits for it
"""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.faults import Fault

LONGEST = 60.0  # seconds for one command
POLLED = 3.0
STALE = 60.0  # seconds without an answer after which the state is unknown


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    error: str

    @property
    def line(self) -> str:
        """The client's error message, without repetitions."""
        lines = [line.strip() for line in (self.error or self.output).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines)) or f"ended with code {self.code}"


@dataclass(frozen=True)
class State:
    """State of one attempt's members in the scheduler."""

    alive: dict[int, bool | None]
    waits: str | None = None  # why the attempt is still in the scheduler's queue
    words: tuple[str, ...] = ()  # the scheduler's messages on members that ended or cannot start


def run(command: Sequence[str], text: str = "") -> Result:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LONGEST)
    except FileNotFoundError:
        raise Fault(f"gang.engine: this host has no {command[0]}; start the flow on a host that has it") from None
    except subprocess.TimeoutExpired:
        return Result(124, "", f"{command[0]}: no answer within {LONGEST:.0f} s")
    return Result(done.returncode, done.stdout, done.stderr)


class Polled:
    """Members 0 to n - 1 of an attempt. A thread calls query() repeatedly and keeps their latest state.

    The state becomes unknown if query() returns None for STALE seconds, as the scheduler does not answer.
    """

    def __init__(self, n: int, query: Callable[[], State | None]):
        self.n, self._query, self._over = n, query, threading.Event()
        self._state, self._at = State(dict.fromkeys(range(n))), time.monotonic()
        threading.Thread(target=self._poll, daemon=True, name="scheduler").start()

    @property
    def state(self) -> State:
        return self._state if time.monotonic() - self._at < STALE else State(dict.fromkeys(range(self.n)))

    def alive(self) -> dict[int, bool | None]:
        return self.state.alive

    def waits(self) -> str | None:
        return self.state.waits

    def words(self) -> tuple[str, ...]:
        return self.state.words

    def wait_for_end(self, seconds: float) -> None:
        """Wait until no member is alive or `seconds` have passed, and end the thread."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(self.alive().values()):
            time.sleep(0.2)
        self.stop_polling()

    def stop_polling(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        while not self._over.is_set():
            if (state := self._query()) is not None:
                self._state, self._at = state, time.monotonic()
            self._over.wait(POLLED)
