"""Clients of schedulers, as commands: sbatch, squeue, kubectl. They may take long, fail, or not be there.

Result = run(command, text)      once, with text on its standard input
Asked(ask)                       a thread that asks again and again, so that whoever wants the answer never waits
"""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.faults import Fault

LONGEST = 60.0  # seconds for one command
POLLED = 3.0
STALE = 60.0  # seconds without an answer after which nobody knows


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    error: str

    @property
    def line(self) -> str:
        """The client's message on its failure, without repetitions."""
        lines = [line.strip() for line in (self.error or self.output).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines)) or f"ended with code {self.code}"


@dataclass(frozen=True)
class State:
    """State of one attempt's members, as its scheduler knows them."""

    alive: dict[int, bool | None]
    waits: str | None = None  # why the scheduler has not given it any host yet
    words: tuple[str, ...] = ()  # what it says of the end of members, and of what keeps them from beginning


def run(command: Sequence[str], text: str = "") -> Result:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LONGEST)
    except FileNotFoundError:
        raise Fault(f"gang.engine: this host has no {command[0]}; start the flow where it is") from None
    except subprocess.TimeoutExpired:
        return Result(124, "", f"{command[0]}: no answer within {LONGEST:.0f} s")
    return Result(done.returncode, done.stdout, done.stderr)


class Asked:
    """Latest state of an attempt, from a thread that calls ask() again and again.

    It is unknown while ask() returns None, as the scheduler does not answer.
    """

    def __init__(self, n: int, ask: Callable[[], State | None]):
        self._n, self._ask, self._over = n, ask, threading.Event()
        self._state, self._at = State(dict.fromkeys(range(n))), time.monotonic()
        threading.Thread(target=self._poll, daemon=True, name="scheduler").start()

    @property
    def state(self) -> State:
        return self._state if time.monotonic() - self._at < STALE else State(dict.fromkeys(range(self._n)))

    def wait(self, seconds: float, until: Callable[[State], bool]) -> None:
        """Wait until the state is so, but no longer than these seconds."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not until(self.state):
            time.sleep(0.2)

    def end(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        while not self._over.is_set():
            if (state := self._ask()) is not None:
                self._state, self._at = state, time.monotonic()
            self._over.wait(POLLED)
