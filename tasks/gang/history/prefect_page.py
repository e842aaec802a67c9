"""A gang's page in Prefect, its line in MLflow and its history in the store, as its attempts begin and end.

    with reporting(History(gang, run, flow), metrics, store, tracked, key) as teller:
        controller.carry_out(..., teller)

A thread for each service carries the newest history only. A service that is away delays nobody, and gets it when it is
back.
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
LAST_WORDS = 5.0  # seconds that the end of a job waits for both; then their threads continue in the background
SHOWN = 50  # hosts and attempts on the page


@contextlib.contextmanager
def reporting(history: History, metrics: Path, store: Store, tracked: Stage, key: str) -> Iterator[Teller]:
    """Report a gang to all services. Its page in Prefect has this key."""
    artifact = TaskArtifact(key, "markdown")
    earlier = functools.cache(lambda: timeline.read(store, history.gang))  # by earlier flow runs

    def keep(news: History) -> None:
        timeline.write(store, news.behind(earlier()))

    def show(news: History) -> None:
        whole = news.behind(earlier())
        artifact.send(page(whole, store), state(whole))

    carriers = [Carrier(give, f"{give.__name__} {history.gang}") for give in (keep, show)]

    def tell(news: History) -> None:
        tag(tracked, news)
        for carrier in carriers:
            carrier.take(news)

    teller = Teller(history, metrics, tell)
    try:
        with teller.over():
            yield teller
    finally:
        until = time.monotonic() + LAST_WORDS
        for carrier in carriers:
            carrier.close(max(0.0, until - time.monotonic()))


def tag(tracked: Stage, news: History) -> None:
    """Tag the run in MLflow. The call returns at once: the journal waits for MLflow, nobody else does."""
    names = [host.name for host in news.hosts]
    tags: dict[str, Any] = {"finetune.gang": news.gang, "finetune.gang.hosts": ", ".join(names)}
    if news.attempts:
        tags["finetune.gang.attempts"] = news.attempts[-1].number
    if news.failure:
        tags["finetune.gang.last_failure"] = news.failure
    tracked.tags(tags)


class Carrier:
    """Thread that gives the newest history to a service until it has taken it."""

    def __init__(self, give: Callable[[History], None], name: str):
        self.give, self._newest = give, None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True, name=name)
        self._thread.start()

    def take(self, news: History) -> None:
        self._newest = news
        self._wake.set()

    def close(self, within: float) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(within)

    def _carry(self) -> None:
        given = None
        while True:
            closing, news = self._closing.is_set(), self._newest
            with contextlib.suppress(Exception):  # the service is away
                if news is not None and news is not given:
                    self.give(news)
                    given = news
            if closing and given is self._newest:
                return
            self._wake.wait(AGAIN if news is not given else None)
            self._wake.clear()


def page(told: History, store: Store) -> str:
    """The page in Markdown."""
    text = [f"# Gang of {words(told.run)}", "", f"`{told.gang}`, controlled by {words(told.flow)}"]
    hosts = told.hosts
    rows = [(code(one.name), code(one.address), _ranks(one.first, one.ranks)) for one in hosts[:SHOWN]]
    text += ["", f"## Hosts: {len(hosts)}", *table(("host", "address", "ranks"), rows)] if rows else []
    text += [f"\nand {len(hosts) - SHOWN} more"] if len(hosts) > SHOWN else []
    attempts = settled(told)[: -SHOWN - 1 : -1]
    text += ["", f"## Attempts: {told.attempts[-1].number}"]
    text += table(("attempt", "began (UTC)", "took", "steps", "hosts"), map(_row, attempts))
    text += ["", *(line for one in attempts if one.how for line in _end(one))]  # longer than a table shows
    place = store.link(f"gangs/{told.gang}")
    place = f"[{place}]({place})" if place.startswith("http") else f"`{place}`"
    text += ["", "## Logs", "", f"Of every rank, in {place}, below ATTEMPT/logs. To read them:", ""]
    return "\n".join([*text, fenced("\n".join(_commands(told)))]) + "\n"


def brief(told: History) -> str:
    """A line for the report of the run."""
    count = told.attempts[-1].number
    line = f"{words(state(told))}, on {len(told.hosts)} hosts, in {count} attempt{'s' * (count > 1)}"
    failure = f"; the last failure was {words(told.failure)}" if told.failure else ""
    return f"Gang: {line}{failure}. `{_command(told)}`"


def _end(one: Attempt) -> tuple[str, ...]:
    then = (f"    - then: {words(one.next)}",) if one.next else ()
    return (f"- attempt {one.number}: {words(one.how)}", *then)


def _row(one: Attempt) -> tuple[str, ...]:
    began = datetime.fromtimestamp(one.began, UTC).strftime("%m-%d %H:%M:%S")
    took = clock(one.ended - one.began) if one.ended else ""
    steps = f"{one.start} to {one.reached}" if one.ended else f"from {one.start}"
    hosts = str(len(one.hosts)) if one.hosts else ""
    return str(one.number), began, took, steps if one.hosts else "", hosts


def _commands(told: History) -> list[str]:
    line = _command(told)
    failed = next((one for one in reversed(told.attempts) if one.hosts and one.how not in ("", DONE)), None)
    found = [line, f"{line} --follow"] if not told.end else [line]
    if failed:
        found.append(f"{line} --attempt {failed.number}{_whose(failed)} --err")
    return found


def _command(told: History) -> str:
    return f"python -m flows.logs {told.gang}"


def _whose(failed: Attempt) -> str:
    """The option of flows.logs for the rank or host that is first to blame, if the failure's line names it."""
    if rank := re.search(r"\brank (\d+) on ", failed.how):
        return f" --rank {rank[1]}"
    named = {*re.split(r"[ :;,]+", failed.how)}
    return next((f" --host {host.name}" for host in failed.hosts if host.name in named), "")


def _ranks(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"
