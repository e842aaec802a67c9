"""Next step after a failed attempt: try again, leave out a host, use fewer hosts, or end.

This module is pure: the history goes in, a decision comes out.

    decide(attempts, run, retries=3, available=3, fits=fits) -> Decision
    fewer(run, left, fits) -> Run | None      the run on as many of the remaining hosts as it can use

`fits(nodes)` returns the run on fewer hosts, or None if it cannot run there.

The rules, each with its reason:

- A failure that would happen again ends the run: a wrong configuration, a bad row, too little memory.
- Retries are counted since the last checkpoint that got further: the tenth broken host does not end a run of a month.
- A preemption is not a failure and does not count. Ten in a row without any progress do.
- The same cause at the same step on two different hosts comes from the program or the data: there is no third try.
- A host that is certainly the cause (Xid, ECC, gone) is left out at once. A host that was only the first to fail is
  left out after the second time.
- If fewer hosts remain than the layout needs, the run uses fewer nodes, if gang.min_nodes allows it and a layout of the
  same model, batch and degrees fits on them. dp shrinks and gradient accumulation grows, so the losses stay the same.
  Otherwise the gang waits for a host.
- Waits grow from 5 s to 2 minutes if the cause is a service (storage, network): it may come back.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.schema.run import Run
from tasks.gang.diagnosis.classify import Failure

Action = Literal["retry", "retry without", "fewer", "stop"]

FRUITLESS = 10  # preemptions without a checkpoint between them
SUSPECT = 2  # attempts in which a host was the first to fail
WAIT, LONGEST_WAIT = 5.0, 120.0  # seconds
QUICK = ("host", "unknown", "hang")  # kinds after which hosts may continue at once
RETRY_AT_ONCE = ("host", "hang", "preempted", "unknown")

Fits = Callable[[int], Run | None]


def never(nodes: int) -> Run | None:
    """Fits of a run that must keep all its hosts."""
    return None


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended, as the controller saw it."""

    failure: Failure
    checkpoint: int = 0  # newest complete step when it ended


@dataclass(frozen=True)
class Decision:
    action: Action
    line: str
    without: tuple[str, ...] = ()  # hosts that take no part from now on
    nodes: int = 0  # of the next attempt
    wait: float = 0.0  # seconds before it


def decide(
    attempts: Sequence[Attempt], run: Run, retries: int, available: int | None = None, fits: Fits = never
) -> Decision:
    """Decide what follows the last attempt.

    `run` has all hosts that it requests, even if the last attempt had fewer. `available` is the number of hosts
    that the engine has, including broken ones; None if it is unknown.
    """
    last, failure = attempts[-1], attempts[-1].failure
    if not failure.retry:
        return Decision("stop", failure.line)
    since = _since_progress(attempts)
    counted = [attempt for attempt in since if attempt.failure.kind != "preempted"]
    if len(counted) > retries:
        return Decision("stop", f"{failure.line}; {len(counted)} failures since step {last.checkpoint}, of {retries}")
    if len(since) - len(counted) >= FRUITLESS:
        return Decision("stop", f"{failure.line}; taken back {FRUITLESS} times since step {last.checkpoint}")
    if _repeats(counted):
        again = f"twice at step {failure.step}, on other hosts: not a host's fault"
        return Decision("stop", f"{failure.line}; {again}")
    out = left_out(attempts)
    wait = 0.0
    if failure.kind not in RETRY_AT_ONCE:
        wait = min(LONGEST_WAIT, WAIT * 2 ** (len(counted) - 1))
    nodes = run.layout.nodes
    left = nodes if available is None else available - len(out)
    if left < nodes and (smaller := fewer(run, left, fits)):
        left = smaller.layout.nodes
        line = f"continues with {left} of {nodes} hosts, without {', '.join(out) or 'those that are gone'}"
        return Decision("fewer", line, out, left, wait)
    if out:
        return Decision("retry without", f"continues without {', '.join(out)}", out, nodes, wait)
    line = f"resumes from step {last.checkpoint}" if last.checkpoint else "begins again"
    return Decision("retry", line, (), nodes, wait)


def is_quick(attempts: Sequence[Attempt]) -> bool:
    """Whether the hosts that are left may continue at once: their members stay.

    This holds if the last attempt trained and then lost a rank or a host, for the first time since the last checkpoint.
    A rank that hangs is lost too: it is killed, and the hosts are measured again. A second failure may come from
    something that stayed, so everything starts again.
    """
    last, started = attempts[-1].failure, attempts[-2].checkpoint if len(attempts) > 1 else 0
    first = len(_since_progress(attempts)) == 1
    return first and last.retry and last.kind in QUICK and last.step > started


def left_out(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Hosts to be left out. The last to fail comes first."""
    out: Counter[str] = Counter()
    last: dict[str, int] = {}
    for number, attempt in enumerate(attempts):
        suspects = {attempt.failure.host} if attempt.failure.kind in ("host", "hang", "network", "storage") else set()
        for host in suspects.union(attempt.failure.blamed) - {""}:
            out[host] += SUSPECT if host in attempt.failure.blamed else 1
            last[host] = number
    hosts = (host for host, count in out.items() if count >= SUSPECT)
    return tuple(sorted(hosts, key=lambda host: (-last[host], host)))


def _since_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Attempts at the end of the history that ended with the newest checkpoint, in order."""
    newest = attempts[-1].checkpoint
    earlier = [number for number, attempt in enumerate(attempts) if attempt.checkpoint < newest]
    return [*attempts[max(earlier, default=-1) + 1 :]]


def _repeats(counted: Sequence[Attempt]) -> bool:
    if len(counted) < 2:
        return False
    last, before = counted[-1], counted[-2]
    same = last.failure.kind == before.failure.kind == "unknown" and last.failure.step == before.failure.step
    return same and last.failure.host != before.failure.host


def fewer(run: Run, left: int, fits: Fits) -> Run | None:
    """Return the run on as many of the `left` hosts as it can use, but on fewer than it requests."""
    sizes = range(min(left, run.layout.nodes - 1), 0, -1)
    return next(filter(None, (fits(nodes) for nodes in sizes)), None)
