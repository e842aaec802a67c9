"""A gang's page in Prefect, its tags in MLflow and its history in the store, updated as attempts begin and end.

    with reporting(History(gang, run, flow), metrics, store, tracked, key) as teller:
        controller.carry_out(..., teller)

A thread per service sends only the newest history. An outage of a service blocks nothing, and the service gets the
newest history afterwards.
"""

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contract.amounts import clock
from tasks.gang.history import timeline
from tasks.gang.history.timeline import DONE, Attempt, History, Teller, settled, state
from tasks.pages.markdown import code, fenced, table, words
from tasks.run.task_artifact import TaskArtifact
from tasks.store import Store
from tasks.tracking import Stage

AGAIN = 5.0  # seconds between tries
LAST_WORDS = 5.0  # seconds that the end of a job waits for both threads; they continue in the background
SHOWN = 50  # hosts and attempts on the page


@contextlib.contextmanager
def reporting(history: History, metrics: Path, store: Store, tracked: Stage, key: str) -> Iterator[Teller]:
    """Report a gang to all services. Its page in Prefect has this key."""
    artifact = TaskArtifact(key, "markdown")
    earlier = functools.cache(lambda: timeline.read(store, history.gang))  # of earlier flow runs

    def keep(newest: History) -> None:
        timeline.write(store, newest.after(earlier()))

    def show(newest: History) -> None:
        whole = newest.after(earlier())
        artifact.send(page(whole, store), state(whole))

    carriers = [Carrier(give, f"{give.__name__} {history.gang}") for give in (keep, show)]

    def tell(newest: History) -> None:
        tag(tracked, newest)
        for carrier in carriers:
            carrier.take(newest)

    teller = Teller(history, metrics, tell)
    try:
        with teller.over():
            yield teller
    finally:
        until = time.monotonic() + LAST_WORDS
        for carrier in carriers:
            carrier.close(max(0.0, until - time.monotonic()))


def tag(tracked: Stage, history: History) -> None:
    """Tag the run in MLflow. The call returns at once, as the journal sends the tags later."""
    names = [host.name for host in history.hosts]
    tags: dict[str, Any] = {"finetune.gang": history.gang, "finetune.gang.hosts": ", ".join(names)}
    if history.attempts:
        tags["finetune.gang.attempts"] = history.attempts[-1].number
    if history.failure:
        tags["finetune.gang.last_failure"] = history.failure
    tracked.tags(tags)


class Carrier:
    """Thread that sends the newest history to a service, and tries again until the service accepts it."""

    def __init__(self, send: Callable[[History], None], name: str):
        self.send, self._newest = send, None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True, name=name)
        self._thread.start()

    def take(self, newest: History) -> None:
        self._newest = newest
        self._wake.set()

    def close(self, within: float) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(within)

    def _carry(self) -> None:
        sent = None
        while True:
            closing, newest = self._closing.is_set(), self._newest
            with contextlib.suppress(Exception):  # the service does not answer
                if newest is not None and newest is not sent:
                    self.send(newest)
                    sent = newest
            if closing and sent is self._newest:
                return
            self._wake.wait(AGAIN if newest is not sent else None)
            self._wake.clear()


def page(history: History, store: Store) -> str:
    """The page in Markdown."""
    text = [f"# Gang of {words(history.run)}", "", f"`{history.gang}`, controlled by {words(history.flow)}"]
    hosts = history.hosts
    rows = [(code(host.name), code(host.address), _ranks(host.first, host.ranks)) for host in hosts[:SHOWN]]
    text += ["", f"## Hosts: {len(hosts)}", *table(("host", "address", "ranks"), rows)] if rows else []
    text += [f"\nand {len(hosts) - SHOWN} more"] if len(hosts) > SHOWN else []
    attempts = settled(history)[: -SHOWN - 1 : -1]
    text += ["", f"## Attempts: {history.attempts[-1].number}"]
    text += table(("attempt", "began (UTC)", "took", "steps", "hosts"), map(_row, attempts))
    text += ["", *(line for attempt in attempts if attempt.how for line in _end(attempt))]  # too long for a table
    place = store.link(f"gangs/{history.gang}")
    place = f"[{place}]({place})" if place.startswith("http") else f"`{place}`"
    text += ["", "## Logs", "", f"Of every rank, in {place}, below ATTEMPT/logs. To read them:", ""]
    return "\n".join([*text, fenced("\n".join(_commands(history)))]) + "\n"


def brief(history: History) -> str:
    """A line for the report of the run."""
    count = history.attempts[-1].number
    line = f"{words(state(history))}, on {len(history.hosts)} hosts, in {count} attempt{'s' * (count > 1)}"
    failure = f"; the last failure was {words(history.failure)}" if history.failure else ""
    return f"Gang: {line}{failure}. `{_command(history)}`"


def _end(attempt: Attempt) -> tuple[str, ...]:
    then = (f"    - then: {words(attempt.next)}",) if attempt.next else ()
    return (f"- attempt {attempt.number}: {words(attempt.how)}", *then)


def _row(attempt: Attempt) -> tuple[str, ...]:
    began = datetime.fromtimestamp(attempt.began, UTC).strftime("%m-%d %H:%M:%S")
    took = clock(attempt.ended - attempt.began) if attempt.ended else ""
    steps = f"{attempt.start} to {attempt.reached}" if attempt.ended else f"from {attempt.start}"
    hosts = str(len(attempt.hosts)) if attempt.hosts else ""
    return str(attempt.number), began, took, steps if attempt.hosts else "", hosts


def _commands(history: History) -> list[str]:
    line = _command(history)
    failed = next(
        (attempt for attempt in reversed(history.attempts) if attempt.hosts and attempt.how not in ("", DONE)), None
    )
    commands = [line] if history.end else [line, f"{line} --follow"]
    if failed:
        commands.append(f"{line} --attempt {failed.number}{_culprit(failed)} --err")
    return commands


def _command(history: History) -> str:
    return f"python -m flows.logs {history.gang}"


def _culprit(failed: Attempt) -> str:
    """The option of flows.logs for the rank or host that the failure's line names first; empty if it names none."""
    if rank := re.search(r"\brank (\d+) on ", failed.how):
        return f" --rank {rank[1]}"
    line_words = {*re.split(r"[ :;,]+", failed.how)}
    return next((f" --host {host.name}" for host in failed.hosts if host.name in line_words), "")


def _ranks(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"
