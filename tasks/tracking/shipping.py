"""Threads that carry a journal's events to a service, in their order, for as long as it takes. Nobody waits for them.

When a service is away for minutes or days, the same event is tried again, at most 10 s apart. An event that the service
refuses for good (a parameter whose value changes, a run that somebody deleted) is dropped with one line, and the rest
goes on.

A sink has take(events, runs, attempt). It carries out one or more of the first events, returns how many, and notes its
own names of runs in the dict `runs`. It raises Away if the service is away, and Refused if the service refuses the
first event. Every event may come twice: a process that dies between the service's answer and the cursor's move sends it
again.
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

PAUSE = 0.3  # seconds between rounds while all is well, so that one call carries several events
PATIENCE = 10.0  # seconds between tries at most


class Sink(Protocol):
    def take(self, events: list[dict], runs: dict, attempt: str) -> int: ...


class Shipper(threading.Thread):
    """Thread that carries a journal to one service; before that, what was left behind for the same service."""

    def __init__(self, own: Journal, service: str, address: str, before: Iterable[Journal] = ()):
        super().__init__(name=f"ship {own.folder.name} to {service}", daemon=True)
        self.own, self.service, self.address, self.before = own, service, address, before
        self.runs: dict[str, str] = {}
        self.trouble = ""
        self.closing, self.hurry, self.shipped = threading.Event(), threading.Event(), threading.Event()
        self.news = threading.Event()
        own.listeners.append(self.news)
        self.sink: Sink | None = None

    def run(self) -> None:
        for dead in self.before:
            end_the_dead(dead)
            for service in dead.meta["sinks"][1:]:
                Shipper(dead, service, self.address).finish()
            self._ship(dead, {}, last=True)
            dead.leave()
        self._ship(self.own, self.runs, last=False)
        self.own.leave()
        self.shipped.set()

    def finish(self) -> None:
        """Ship the events that are there, and no more."""
        self.closing.set()
        self.start()

    def close(self, timeout: float) -> bool:
        """Whether all events got there in time."""
        self.closing.set()
        self.hurry.set()
        self.news.set()
        return self.shipped.wait(timeout)

    def _ship(self, source: Journal, runs: dict, last: bool) -> None:
        cursor = source.cursor(self.service)
        runs |= cursor["runs"]
        while True:
            self.news.clear()
            closing = last or self.closing.is_set()  # asked before the last look
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
                self.sink = _open(self.service, self.address, self.own)
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
            log.warning("tracking: %s of %s is left out: %s", event.get("do"), event.get("run"), refusal)
            return 1

    def _try[T](self, call: Callable[[], T]) -> T:
        pause = PAUSE
        while True:
            try:
                result = call()
            except (Away, OSError) as reason:
                if self.trouble and pause == 2 * PAUSE:  # once is often a connection that the server closed
                    log.warning("tracking: events wait on the disk: %s", reason)
                self.trouble = str(reason)
                self.hurry.wait(pause)
                pause = min(2 * pause, PATIENCE)
                if self.closing.is_set():
                    self.hurry.clear()
                continue
            self.trouble = ""
            return result


def _open(service: str, address: str, own: Journal) -> Sink:
    if service == "mlflow":
        from tasks.tracking.mlflow_sink import MlflowSink

        return MlflowSink(address, own.meta["experiment"])
    from tasks.tracking.wandb_sink import WandbSink

    return WandbSink(own.meta["wandb"], own.folder.parent)


def drain(root: Path, timeout: float) -> list[str]:
    """Ship the journals that killed processes left behind. Returns a line for each of them."""
    lines, until = [], time.monotonic() + timeout
    for dead in journal.dead(root):
        end_the_dead(dead)
        count = {service: dead.waiting(service) for service in dead.meta["sinks"]}
        shippers = [Shipper(dead, service, with_password(dead.meta["uri"])) for service in dead.meta["sinks"]]
        for shipper in shippers:
            shipper.finish()
        late = [s for s in shippers if not s.close(max(0.0, until - time.monotonic()))]
        told = f"{count['mlflow']} events" if not late else f"they wait: {late[0].trouble or 'it is slow'}"
        lines.append(f"{dead.folder.name} to {dead.meta['uri']}: {told}")
    return lines


def end_the_dead(dead: Journal) -> None:
    """End the runs of a killed process, which could not do so; those that another flow has taken over go on."""
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
    """Dead journals for this service. The others are let go at once."""
    for dead in journal.dead(root):
        if dead.meta["uri"] == uri:
            yield dead
        else:
            dead.release()
