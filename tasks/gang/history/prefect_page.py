"""A gang's page in Prefect, its tags in MLflow and its history in the store, updated as attempts begin and end.

    with reporting(History(gang, run, flow), metrics, store, tracked, key) as teller:
        controller.carry_out(Gang(..., teller, ...))

A thread per service sends only the newest history (tasks/run/courier.py). An outage of a service blocks nothing, and
the service gets the newest history afterwards.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.gang.history import spent, timeline
from tasks.gang.history.timeline import DONE, Attempt, History, Spends, Teller, settled, state
from tasks.pages.markdown import render, words
from tasks.run.courier import Courier, closing
from tasks.run.task_artifact import TaskArtifact
from tasks.store import Store
from tasks.tracking import Stage

AGAIN = 5.0  # seconds between tries
LAST_WORDS = 5.0  # seconds that the end of a job waits for both threads; they continue in the background
SHOWN = 50  # hosts and attempts on the page


@contextlib.contextmanager
def reporting(
    history: History,
    metrics: Path,
    store: Store,
    tracked: Stage,
    key: str,
    work: Path | None = None,
    spends: Spends = lambda _: {},
) -> Iterator[Teller]:
    """Report a gang to all services. Its page in Prefect has this key. The folder `work` keeps its attempts."""
    artifact = TaskArtifact(key, "markdown")
    earlier = functools.cache(lambda: timeline.read(store, history.gang))  # of earlier flow runs

    def keep(newest: History) -> None:
        timeline.write(store, newest.after(earlier()))

    def show(newest: History) -> None:
        whole = newest.after(earlier())
        artifact.send(page(whole, store), state(whole))

    couriers = [Courier(give, f"{give.__name__} {history.gang}", most=1, again=AGAIN) for give in (keep, show)]

    def tell(newest: History) -> None:
        tag(tracked, newest)
        for courier in couriers:
            courier.take(newest)

    teller = Teller(history, metrics, tell, work, spends)
    with closing(LAST_WORDS, *couriers), teller.over():
        yield teller


def tag(tracked: Stage, history: History) -> None:
    """Tag the run in MLflow. The call returns at once, as the journal sends the tags later."""
    names = [host.name for host in history.hosts]
    tags: dict[str, Any] = {"finetune.gang": history.gang, "finetune.gang.hosts": ", ".join(names)}
    if history.attempts:
        tags["finetune.gang.attempts"] = history.attempts[-1].number
    if history.failure:
        tags["finetune.gang.last_failure"] = history.failure
    tracked.tags(tags)


def page(history: History, store: Store) -> str:
    """The page in Markdown."""
    place = store.link(f"gangs/{history.gang}")
    return render(
        "gang",
        history=history,
        shown=SHOWN,
        attempts=settled(history)[: -SHOWN - 1 : -1],
        began=lambda attempt: f"{datetime.fromtimestamp(attempt.began, UTC):%m-%d %H:%M:%S}",
        spent=spent.text(history.seconds),
        place=f"[{place}]({place})" if place.startswith("http") else f"`{place}`",
        commands=_commands(history),
    )


def brief(history: History) -> str:
    """A line for the report of the run."""
    count = history.attempts[-1].number
    line = f"{words(state(history))}, on {len(history.hosts)} hosts, in {count} attempt{'s' * (count > 1)}"
    failure = f"; the last failure was {words(history.failure)}" if history.failure else ""
    return f"Gang: {line}{failure}. `{_command(history)}`"


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
