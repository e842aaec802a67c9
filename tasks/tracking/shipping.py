"""Threads that send a journal's events to a service, in order, in the background.

During an outage of any length the same event is repeated, at least every 10 s. An event that the service refuses
permanently (a parameter whose value changes, a deleted run) is dropped with a warning, and the rest is sent.

A sink has take(events, runs, attempt). It sends one or more of the first events, returns their number, and stores its
ids of runs in the dict `runs`. It raises Away during an outage, and Refused if the service refuses the first event.
Every event may be sent twice, because a process may die after the service's answer and before the cursor moves.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from tasks.tracking import journal
from tasks.tracking.address import with_password
from tasks.tracking.journal import Journal
from tasks.tracking.outages import Away, Refused, line_of

log = logging.getLogger("finetune.tracking")

PAUSE = 0.3  # seconds between rounds; events of this time are sent in one call
PATIENCE = 10.0  # longest pause between retries, in seconds


class Sink(Protocol):
    def take(self, events: list[dict], runs: dict, attempt: str) -> int: ...


class Shipper(threading.Thread):
    """Thread that sends the dead journals in `before`, then this process's journal, to one service."""

    def __init__(self, journal: Journal, service: str, address: str, before: Iterable[Journal] = ()):
        super().__init__(name=f"ship {journal.folder.name} to {service}", daemon=True)
        self.journal, self.service, self.address, self.before = journal, service, address, before
        self.runs: dict[str, str] = {}
        self.trouble = ""
        self.closing, self.hurry, self.shipped = threading.Event(), threading.Event(), threading.Event()
        self.news = threading.Event()
        journal.listeners.append(self.news)
        self.sink: Sink | None = None

    def run(self) -> None:
        for dead in self.before:
            end_the_dead(dead)
            for service in dead.meta["sinks"][1:]:
                Shipper(dead, service, self.address).finish()
            self._ship(dead, {}, last=True)
            dead.leave()
        self._ship(self.journal, self.runs, last=False)
        self.journal.leave()
        self.shipped.set()

    def finish(self) -> None:
        """Ship the existing events, and then end."""
        self.closing.set()
        self.start()

    def close(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds. Return whether all events were sent."""
        self.closing.set()
        self.hurry.set()
        self.news.set()
        return self.shipped.wait(timeout)

    def _ship(self, source: Journal, runs: dict, last: bool) -> None:
        cursor = source.cursor(self.service)
        runs |= cursor["runs"]
        while True:
            self.news.clear()
            closing = last or self.closing.is_set()  # read before the last read of events
            events = source.read(cursor["offset"])
            while events:
                done = self._try(lambda: self._take(events, runs, source.meta["attempt"]))  # noqa: B023
                cursor = {"offset": events[done - 1][1], "runs": runs}
                self._try(lambda: source.advance(self.service, cursor))  # noqa: B023
                events = events[done:] or source.read(cursor["offset"])
            if closing:
                return
            self.news.wait()
            self.closing.wait(PAUSE)

    def _opened(self) -> Sink:
        if self.sink is None:
            try:
                self.sink = _open(self.service, self.address, self.journal)
            except Away:
                raise
            except Exception as error:
                raise Away(f"{type(error).__name__}: {line_of(error)}") from None
        return self.sink

    def _take(self, events: list[tuple[dict, int]], runs: dict, attempt: str) -> int:
        try:
            return self._opened().take([event for event, _ in events], runs, attempt)
        except Refused as refusal:
            event = events[0][0]
            log.warning("tracking: %s of %s is dropped: %s", event.get("do"), event.get("run"), refusal)
            return 1

    def _try[T](self, call: Callable[[], T]) -> T:
        pause = PAUSE
        while True:
            try:
                result = call()
            except (Away, OSError) as reason:
                if self.trouble and pause == 2 * PAUSE:  # a single failure is often a connection that the server closed
                    log.warning("tracking: events wait on the disk: %s", reason)
                self.trouble = str(reason)
                self.hurry.wait(pause)
                pause = min(2 * pause, PATIENCE)
                if self.closing.is_set():
                    self.hurry.clear()
                continue
            self.trouble = ""
            return result


def _open(service: str, address: str, events: Journal) -> Sink:
    if service == "mlflow":
        from tasks.tracking.mlflow_sink import MlflowSink

        return MlflowSink(address, events.meta["experiment"])
    from tasks.tracking.wandb_sink import WandbSink

    return WandbSink(events.meta["wandb"], events.folder.parent)


def drain(root: Path, timeout: float) -> list[str]:
    """Send the journals of killed processes. Return a line for each journal."""
    lines, until = [], time.monotonic() + timeout
    for dead in journal.dead(root):
        end_the_dead(dead)
        count = {service: dead.waiting(service) for service in dead.meta["sinks"]}
        shippers = [Shipper(dead, service, with_password(dead.meta["uri"])) for service in dead.meta["sinks"]]
        for shipper in shippers:
            shipper.finish()
        late = [s for s in shippers if not s.close(max(0.0, until - time.monotonic()))]
        result = f"they wait: {late[0].trouble or 'it is slow'}" if late else f"{count['mlflow']} events"
        lines.append(f"{dead.folder.name} to {dead.meta['uri']}: {result}")
    return lines


def end_the_dead(dead: Journal) -> None:
    """End the runs of a killed process, except those that another flow has taken over."""
    open_runs, at, offset = {}, 0, 0
    while events := dead.read(offset):
        offset = events[-1][1]
        for event, _ in events:
            at = max(at, event.get("time", 0), *(row[2] for row in event.get("metrics", ())))
            if event.get("do") == "begin":
                open_runs[event["run"]] = True
            elif event.get("do") == "end":
                open_runs.pop(event["run"], None)
    ends = [{"do": "end", "run": run, "status": "KILLED", "time": at, "if_ours": True} for run in open_runs]
    dead.append(*[end | {"tags": {"finetune.reason": "its process died"}} for end in ends])


def same_service(root: Path, uri: str) -> Iterable[Journal]:
    """Yield dead journals for this service. Other journals are released at once."""
    for dead in journal.dead(root):
        if dead.meta["uri"] == uri:
            yield dead
        else:
            dead.release()
