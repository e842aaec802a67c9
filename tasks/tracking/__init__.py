"""Tracking in MLflow: one run for a flow run, and one for its training. The flow never waits for MLflow.

    t = tracking.start(runs, uri, "glm47", flow_run_id, "brisk-otter", tags={...}, params={...})
    t.ship()                                        # from now on, in threads
    train = t.stage("train", id=f"train-{fingerprint[:12]}", params={...})      # a separate run
    train.follow(folder / "metrics.jsonl")
    t.part("evaluate-base").metrics({"seconds": 7})  # in the flow's run, as stages/evaluate-base/seconds
    ...                                             # minutes or weeks
    train.end("FINISHED")
    t.end("FINISHED")
    if line := t.close(timeout=20): print(line)

    python -m tasks.tracking RUNS                   ship the events of killed flows in RUNS; exit code 1 if some remain

Each call writes to a journal on the disk (journal.py) and returns; threads send it to MLflow (shipping.py,
mlflow_sink.py). If track.wandb is set, followed metrics are also sent to Weights & Biases. A stage with an id, such as
its fingerprint, is one MLflow run across flow runs until it has finished: a flow that starts again after a crash
continues it, and the metrics of each step are logged once. A stage without an id belongs to this flow run. Runs are not
nested, because MLflow draws no curves of nested runs. A flow whose stages are all cached logs nothing. Files passed to
this module are copied, so they should be small; artifacts of stages are logged by URI.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import getpass
import json
import logging
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from contract.faults import Fault
from tasks.tracking import journal, machine
from tasks.tracking.address import clean, public, resolve
from tasks.tracking.journal import Journal
from tasks.tracking.shipping import Shipper, same_service
from tasks.tracking.tail import Tail, metrics

POLL = 1.0  # seconds between reads of a followed file
HANDED_OVER = 60.0  # seconds that a background process tries to ship a short flow's events; the next flow tries again
SAMPLE = 10.0  # seconds between samples of the host; six times that after the first hour
log = logging.getLogger("finetune.tracking")
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Stage:
    """One MLflow run. Every method returns at once."""

    folder = ""  # prefix of its files

    def __init__(self, events: Journal, run: str, stages: list["Stage"], shared: bool = False):
        self._journal, self.run, self._stages = events, run, stages
        self._names = {"run": run, "shared": True} if shared else {"run": run}
        self._tail: Tail | None = None
        self._tables: list[str] = []
        self._has_curves = False
        self._mutex = threading.RLock()
        self._ended = False

    def params(self, values: dict) -> None:
        self._append(do="log", params={_key(key): _text(value, 6000) for key, value in values.items()})

    def tags(self, values: dict) -> None:
        self._append(do="log", tags=_tags(values))

    def metrics(self, values: dict, step: int | None = None) -> None:
        """Log metrics. With a step, the first value of each step is kept; without one, the last value."""
        at = _now()
        rows = [[_key(key), float(value), at, step or 0] for key, value in values.items() if value is not None]
        self._append(do="log", metrics=rows, **({} if step is None else {"axis": "step"}))

    def follow(self, path: Path) -> None:
        """Ship the metrics of a file that a training appends to, until unfollow() or end(). It may appear later."""
        self._tail = Tail(path)
        self._stages.append(self)

    def file(self, content: bytes | Path, name: str) -> None:
        self._file(content, f"{self.folder}{name}")

    def drawn(self, content: bytes | Path, name: str, of: str) -> None:
        """Log a JSON file and its figures. `of` is "data" for a report.json, "plan" for a plan.json."""
        if copy := self._file(content, f"{self.folder}{name}"):
            self._append(do="plots", file=copy, of=of)

    def table(self, rows: list[dict], name: str) -> None:
        """Log or replace a table in the format of mlflow.log_table, which MLflow's page of evaluations shows."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[_plain(row.get(column)) for column in columns] for row in rows]}
        self.file(json.dumps(table, ensure_ascii=False, default=str).encode(), name)
        self._tables = [*dict.fromkeys([*self._tables, name])]
        tag = json.dumps([{"path": path, "type": "table"} for path in self._tables])
        self._append(do="log", tags={"mlflow.loggedArtifacts": tag})

    def dataset(self, name: str, digest: str, source: str, context: str, rows: int | None = None) -> None:
        """Log an input. `context` is training, validation or evaluation. MLflow keeps 36 characters of a digest."""
        source = public(source)
        kind = {"s3": "s3", "hf": "hf", "http": "http", "https": "http"}.get(source.partition("://")[0], "local")
        self._append(
            do="dataset", name=name, digest=digest[:36], source=source, source_type=kind, context=context, rows=rows
        )

    def model(self, name: str, uri: str) -> None:
        """Log a model that the stage reads, by its URI only."""
        name = re.sub(r"[/:.%\"']", "-", name)  # MLflow refuses these characters in a name
        self._append(do="model", name=name, uri=public(uri).replace("'", ""))

    def end(self, status: Status = "FINISHED", reason: str = "") -> None:
        with self._mutex:
            if self._ended:
                return
            self._ended = True
        self.unfollow()
        tags = {"finetune.reason": _text(reason, 5000)} if reason else {}
        self._append(do="end", status=status, time=_now(), tags=tags)

    def unfollow(self) -> None:
        """Ship the rest of the followed file, a copy of it and its figures. Then the file itself may be removed."""
        with self._mutex:
            if self._tail:
                self.catch_up()
                self._tail.close()
                path = self._tail.path
                if path.exists() and (copy := self._file(path, path.name)):
                    self._append(do="plots", file=copy)
                self._tail = None
                self._stages.remove(self)

    def catch_up(self) -> None:
        with self._mutex:
            while self._tail and (lines := self._tail.lines()):
                rows = [row for line in lines for row in metrics(line)]
                self._has_curves |= any(line["kind"] != "start" for line in lines)
                chunks = [rows[first : first + 900] for first in range(0, len(rows), 900)]
                self._journal.append(*[{"do": "log", **self._names, "axis": "step", "metrics": c} for c in chunks])

    def _file(self, content: bytes | Path, name: str) -> str | None:
        """Log a file. Return the path of its copy, or None if it cannot be copied."""
        try:
            copy = str(self._journal.folder / self._journal.keep(content, name))
        except OSError as error:
            log.warning("tracking: %s is not logged: %s", name, error.strerror)
            return None
        self._append(do="file", name=name, file=copy)
        return copy

    def sample(self, values: dict[str, float]) -> None:
        """Log the host's load, but only after the first metrics of training: MLflow lists metrics by arrival."""
        if not self._has_curves:
            return
        self._append(do="log", axis="time", metrics=[[key, value, _now(), 0] for key, value in values.items()])

    def _append(self, **event) -> None:
        self._journal.append({**self._names, **event})


class Part(Stage):
    """A stage's part of the flow's run: the stage's name is the prefix of everything that it logs."""

    def __init__(self, whole: "Tracking", events: Journal, name: str):
        super().__init__(events, whole.run, whole._stages)
        self._whole, self.name, self.folder = whole, name, f"{name}/"

    def metrics(self, values: dict, step: int | None = None) -> None:
        assert step is None, "a curve needs a run, or a file to follow"
        self._whole.metrics_at_end({f"stages/{self.name}/{key}": value for key, value in values.items()})

    def tags(self, values: dict) -> None:
        super().tags({f"finetune.{self.name}.{key.removeprefix('finetune.')}": value for key, value in values.items()})

    def table(self, rows: list[dict], name: str) -> None:
        self._whole.table(rows, f"{self.name}/{name}")

    def end(self, status: Status = "FINISHED", reason: str = "") -> None:
        """Tag the status of the stage. The flow's run continues."""
        if not self._ended:
            self._ended = True
            self.tags({"state": status} | ({"reason": reason} if reason else {}))


class Tracking(Stage):
    """The flow's run, and the threads that send all events."""

    def __init__(self, events: Journal, address: str, flow: str, root: Path):
        super().__init__(events, "flow", [])
        self._flow, self._address, self._runs, self.shipping = flow, address, root.parent, False
        self._shippers = [Shipper(events, "mlflow", address, same_service(root, public(address)))]
        self._shippers += [Shipper(events, service, address) for service in events.meta["sinks"][1:]]
        self._at_end: dict[str, float] = {}
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look, name=f"watch {events.folder.name}", daemon=True)

    def stage(self, name: str, id: str | None = None, tags: dict | None = None, params: dict | None = None) -> Stage:
        shared, id = id is not None, _id(id or f"{self._flow}.{re.sub('[^\\w.-]', '-', name)}")
        stage = Stage(self._journal, id, self._stages, shared)
        self._begin(id, name, "flow", tags or {}, id, shared)
        if params:
            stage.params(params)
        return stage

    def metrics_at_end(self, values: dict) -> None:
        """Log metrics at the end of the run, because MLflow lists metrics in order of arrival."""
        self._at_end |= values

    def end(self, status: Status = "FINISHED", reason: str = "") -> None:
        if self._at_end:
            self.metrics(self._at_end)
        super().end(status, reason)

    def part(self, name: str) -> Part:
        """Return the part of a stage that has no separate run."""
        return Part(self, self._journal, name)

    def run_id(self, id: str = "flow") -> str | None:
        """Return MLflow's id of a run, by the id or the name of its stage; None until MLflow has created the run."""
        runs = self._shippers[0].runs
        return runs.get(id) or runs.get(f"{self._flow}.{id}")

    def ship(self) -> None:
        """Start to send events while the flow runs."""
        if not self.shipping:
            self.shipping = True
            for thread in (*self._shippers, self._watch):
                thread.start()

    def close(self, timeout: float = 10.0, hand_over: bool = False) -> str | None:
        """Wait at most `timeout` seconds until all events are sent. Return a message if events remain on the disk.

        If ship() was not called, a background process sends the events, because importing MLflow takes longer than such
        a flow. `hand_over` starts this process also for a killed flow, which has no time left.
        """
        if not self.shipping:
            self._journal.release()
            self._hand_over()
            return None
        self._closing.set()
        self._watch.join(1.0)
        until = time.monotonic() + timeout
        for shipper in self._shippers:
            shipper.closing.set()
        late = [s for s in self._shippers if not s.close(max(0.0, until - time.monotonic()))]
        if not late:
            return None
        waiting, reason = self._journal.waiting(late[0].service), late[0].trouble or f"not done in {timeout:.0f} s"
        where = public(self._address) if late[0].service == "mlflow" else "Weights & Biases"
        line = f"tracking: {waiting} events for {where} wait in {self._journal.folder} ({reason}); "
        if hand_over:
            self._hand_over("--after", str(self._journal.folder))
            line += f"a background process tries to ship them for {HANDED_OVER:.0f} s, otherwise "
        return line + f"the next flow ships them, or python -m tasks.tracking {self._runs}"

    def drop(self) -> None:
        """Drop the events of a flow whose stages are all cached. Events of killed flows are still sent."""
        self._journal.release(drop=True)
        if journal.others(self._journal.folder.parent):
            self._hand_over()

    def _hand_over(self, *options: str) -> None:
        command = [sys.executable, "-m", "tasks.tracking", str(self._runs), "--timeout", str(HANDED_OVER), *options]
        to_null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        os.posix_spawn(sys.executable, command, environment, file_actions=to_null, setsid=True)

    def _begin(self, run: str, name: str, parent: str | None, tags: dict, id: str, shared: bool = False) -> None:
        event = {"do": "begin", "run": run, "id": id, "flow": self._flow, "parent": parent, "name": name}
        tags = {"mlflow.user": _user(), **_tags(tags)}
        self._journal.append({**event, "shared": shared, "time": _now(), "tags": tags})

    def _look(self) -> None:
        """Read the followed files once a second, and the host's load every SAMPLE seconds, for the open stages."""
        started = sampled = time.monotonic()
        while not self._closing.wait(POLL):
            try:
                for stage in [*self._stages]:
                    stage.catch_up()
                now = time.monotonic()
                if now - sampled >= (SAMPLE if now - started < 3600 else 6 * SAMPLE):
                    sampled = now
                    values = machine.sample()
                    for stage in [*self._stages]:
                        stage.sample(values)
            except Exception as error:  # occasional errors of a file system or a driver
                log.warning("tracking: %s: %s", type(error).__name__, clean(str(error)))
                self._closing.wait(10 * POLL)


def start(
    runs: Path,
    uri: str | None,
    experiment: str,
    id: str,
    name: str,
    tags: dict | None = None,
    params: dict | None = None,
    wandb: str | None = None,
) -> Tracking:
    address = resolve(uri, runs)
    root = runs.absolute() / "tracking"
    sinks = ["mlflow", "wandb"] if wandb else ["mlflow"]
    meta = {"uri": public(address), "experiment": experiment, "wandb": wandb, "sinks": sinks}
    tracking = Tracking(journal.create(root, _id(id), meta), address, _id(id), root)
    tracking._begin("flow", name, None, tags or {}, _id(id))
    if params:
        tracking.params(params)
    return tracking


def _id(text: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,200}", text):
        raise Fault(f"{text!r} is not the name of a run: use letters, digits, '_', '-' and '.'")
    return text


def _key(text: str) -> str:
    return re.sub(r"[^\w./ -]", "_", text)[:250]


def _text(value, most: int) -> str:
    text = clean(str(value)).replace("\0", "")
    return text if len(text) <= most else text[: most - 3] + "..."


def _tags(values: dict) -> dict[str, str]:
    return {_key(key): _text(value, 5000) for key, value in values.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "unknown"


def _now() -> int:
    return round(time.time() * 1000)


def _plain(value):
    """Return a value that a browser's JSON parser accepts: NaN and infinity become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
