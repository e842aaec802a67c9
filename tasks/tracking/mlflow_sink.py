"""Sink that sends the events of a journal to MLflow. Repeating an event has the same effect as sending it once.

Before it creates a run, the sink searches for the tag finetune.id. An unfinished run with this id is continued: its
status becomes RUNNING, its parent becomes the new flow's run (finetune.parent), and an old flow's run that is still
RUNNING becomes KILLED. Metrics of a followed file have one value per step: steps of a key up to the highest in MLflow
are not sent again. The other metrics keep the time of the event, so a repetition is the same row.

Only the shipping thread imports this module: mlflow takes 1.3 s to import, and a new sqlite database needs seconds for
migrations.
"""

# pyright: reportArgumentType=false

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# The shipper repeats requests itself, and can stop earlier.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
logging.getLogger("alembic").setLevel(logging.WARNING)
# This logger writes two tracebacks for each error of the database; shipping.py reports it in one line.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

from mlflow import MlflowClient, entities  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

from contract import ownership  # noqa: E402
from tasks.tracking.outages import Away, Refused, line_of  # noqa: E402

MOST = 1000  # entities of one log_batch, MLflow's limit
REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
    "ENDPOINT_NOT_FOUND",
    "NOT_IMPLEMENTED",
}
log = logging.getLogger("finetune.tracking")


@dataclass
class Known:
    """Known state of a run in MLflow."""

    start: int
    steps: dict[str, int] = field(default_factory=dict)  # the highest, by metric
    params: dict[str, str] = field(default_factory=dict)


class MlflowSink:
    def __init__(self, address: str, experiment: str):
        self.client = _client(address)
        self.experiment = _guard(lambda: _experiment(self.client, address, experiment))
        self.known: dict[str, Known] = {}

    def take(self, events: list[dict], runs: dict, attempt: str) -> int:
        event = events[0]
        do = getattr(self, f"_{event.get('do')}", None)
        if do is None:
            raise Refused("not an event")
        if event["do"] != "begin" and event["run"] not in runs:
            raise Refused("its run was not begun")
        if event["do"] == "log":
            return _guard(lambda: self._log(events, runs, attempt))
        _guard(lambda: do(event, runs, attempt))
        return 1

    def _begin(self, event: dict, runs: dict, attempt: str) -> None:
        tags = dict(event["tags"]) | {"finetune.id": event["id"], "finetune.attempt": attempt}
        tags["finetune.flow"] = event["flow"]
        if event["parent"]:
            tags["finetune.parent"] = runs[event["parent"]]
        run = self._find(event, attempt)
        if run is None:
            run = self.client.create_run(self.experiment, event["time"], tags, event["name"])
            self.known[run.info.run_id] = Known(event["time"])
        else:
            old = run.data.tags.get("finetune.parent")
            if old and old != tags.get("finetune.parent"):
                tags["finetune.resumed_from"] = old
                self._kill(old, event["time"])
            self.client.log_batch(run.info.run_id, tags=[RunTag(*tag) for tag in tags.items()])
            if run.info.status != "RUNNING":
                self.client.update_run(run.info.run_id, "RUNNING")
            self._note(run)
        runs[event["run"]] = run.info.run_id

    def _find(self, event: dict, attempt: str):
        """Return the run with this id, if this attempt created it or it has not finished."""
        with_id, newest_first = f"tags.`finetune.id` = '{event['id']}'", ["attributes.start_time DESC"]
        runs = self.client.search_runs([self.experiment], with_id, order_by=newest_first, max_results=200)
        ours = (
            run for run in runs if run.data.tags.get("finetune.attempt") == attempt or run.info.status != "FINISHED"
        )
        return next(ours, None)

    def _kill(self, run_id: str, at: int) -> None:
        try:
            if self.client.get_run(run_id).info.status == "RUNNING":
                self.client.set_terminated(run_id, "KILLED", at)
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise

    def _log(self, events: list[dict], runs: dict, attempt: str) -> int:
        """Log the content of the first events of one run, as far as one call can carry it."""
        run, metrics, params, tags, taken = events[0]["run"], [], {}, {}, 0
        for event in events:
            rows = event.get("metrics", ())
            if event.get("do") != "log" or event["run"] != run or (taken and len(metrics) + len(rows) > MOST):
                break
            taken += 1
            metrics += [(*row, event.get("axis")) for row in rows]
            params |= event.get("params", {})
            tags |= event.get("tags", {})
        run_id = runs[run]
        if events[0].get("shared") and not self._is_ours(run_id, attempt):
            return taken  # another flow has taken over the run and logs everything
        known = self._of(run_id)
        new, high = [], dict(known.steps)
        for key, value, at, step, axis in metrics:
            if axis == "time":
                step = max(0, at - known.start) // 1000
            elif axis == "step" and step <= high.get(key, -1):
                continue
            else:
                high[key] = max(step, high.get(key, -1))
            new.append(Metric(key, value, at, step))
        new_params = [Param(key, value) for key, value in params.items() if known.params.get(key) != value]
        self._batch(run_id, [*new_params, *[RunTag(key, value) for key, value in tags.items()], *new])
        known.steps, known.params = high, known.params | params
        return taken

    def _batch(self, run_id: str, entities: list) -> None:
        """Send entities in one call. If it is too large, or refused, send both halves, down to the refused entity."""
        kinds = [[e for e in entities if isinstance(e, kind)] for kind in (Metric, Param, RunTag)]
        if not entities:
            return
        try:
            if len(entities) <= MOST and max(len(kinds[1]), len(kinds[2])) <= 100:
                self.client.log_batch(run_id, *kinds, synchronous=True)
                return
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            if len(entities) == 1:
                log.warning("tracking: MLflow refuses %s: %s", entities[0].key, line_of(error))
                return
        middle = len(entities) // 2
        self._batch(run_id, entities[:middle])
        self._batch(run_id, entities[middle:])

    def _end(self, event: dict, runs: dict, attempt: str) -> None:
        run_id = runs[event["run"]]
        if (event.get("if_ours") or event.get("shared")) and not self._is_ours(run_id, attempt):
            return
        if event.get("tags"):
            self._batch(run_id, [RunTag(key, value) for key, value in event["tags"].items()])
        self.client.set_terminated(run_id, event["status"], event["time"])

    def _file(self, event: dict, runs: dict, attempt: str) -> None:
        self._upload(runs[event["run"]], Path(event["file"]), event["name"])

    def _plots(self, event: dict, runs: dict, attempt: str) -> None:
        from tasks.tracking import plots, report_plots

        reports = {"data": report_plots.of_data, "plan": report_plots.of_plan}
        try:
            file, of = Path(event["file"]), event.get("of")
            drawn = reports[of](json.loads(file.read_text())) if of else plots.figures(plots.read(file))
        except Exception as error:
            raise Refused(f"no figures: {line_of(error)}") from None
        with tempfile.TemporaryDirectory() as folder:
            for name, png in drawn.items():
                path = Path(folder, f"{name}.png")
                path.write_bytes(png)
                self._upload(runs[event["run"]], path, f"figures/{path.name}")

    def _upload(self, run_id: str, path: Path, name: str) -> None:
        """Upload a file. An outage of the artifact store must not block the tracking server's events."""
        folder = str(Path(name).parent)
        for pause in (1, 3, None):
            try:
                return self.client.log_artifact(run_id, str(path), None if folder == "." else folder)
            except Exception as error:
                self.client.get_run(run_id)  # raises if the tracking server itself does not answer
                if pause is None:
                    raise Refused(f"{name}: {line_of(error)}") from None
                time.sleep(pause)

    def _dataset(self, event: dict, runs: dict, attempt: str) -> None:
        source = json.dumps({"uri": event["source"]})
        profile = json.dumps({"num_rows": event["rows"]}) if event["rows"] is not None else None
        dataset = entities.Dataset(event["name"], event["digest"], event["source_type"], source, profile=profile)
        tags = [entities.InputTag("mlflow.data.context", event["context"])]
        self.client.log_inputs(runs[event["run"]], [entities.DatasetInput(dataset, tags)])

    def _model(self, event: dict, runs: dict, attempt: str) -> None:
        """Create one LoggedModel per address in an experiment; MLflow does not get its bytes."""
        run_id, key = runs[event["run"]], f"tags.`finetune.uri` = '{event['uri']}'"
        models = self.client.search_logged_models([self.experiment], key, max_results=1)
        if models:
            model = models[0]
        else:
            tags = {"finetune.uri": event["uri"]}
            model = self.client.create_logged_model(self.experiment, event["name"], tags=tags)
        if str(model.status) != "READY":
            self.client.finalize_logged_model(model.model_id, "READY")
        self.client.log_inputs(run_id, models=[entities.LoggedModelInput(model.model_id)])

    def _is_ours(self, run_id: str, attempt: str) -> bool:
        """Return whether no other flow has taken over the run. This also reads the run's state again."""
        run = self.client.get_run(run_id)
        self._note(run)
        return run.data.tags.get("finetune.attempt") == attempt

    def _of(self, run_id: str) -> Known:
        if run_id not in self.known:
            self._note(self.client.get_run(run_id))
        return self.known[run_id]

    def _note(self, run) -> None:
        steps = {metric.key: metric.step for metric in run.data._metric_objs}  # public properties lack the step
        self.known[run.info.run_id] = Known(run.info.start_time, steps, dict(run.data.params))


def _guard[T](call: Callable[[], T]) -> T:
    try:
        return call()
    except (Refused, Away):
        raise
    except MlflowException as error:
        raise (Refused if error.error_code in REFUSALS else Away)(line_of(error)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{type(error).__name__}: {line_of(error)}") from None
    except Exception as error:
        raise Away(line_of(error)) from None


def _client(address: str) -> MlflowClient:
    if not address.startswith("sqlite:///"):
        return MlflowClient(address, address)
    path = Path(address.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that create the tables at once break them.
    with ownership.locked(path.with_name(path.name + ".lock")):
        if not path.exists():
            _make_database(path)
        client = MlflowClient(address, address)
        _guard(lambda: client.search_experiments(max_results=1))
    return client


def _make_database(path: Path) -> None:
    """Create all tables in another file, then rename it, as MLflow never completes a partial database."""
    begun = path.with_name(path.name + ".begun")
    begun.unlink(missing_ok=True)  # after a full disk or a killed process
    address = f"sqlite:///{begun}"
    _guard(lambda: MlflowClient(address, address).search_experiments(max_results=1))
    begun.rename(path)


# Kind of pages that MLflow shows for an experiment; the default is pages of applications.
KIND = ("mlflow.experimentKind", "custom_model_development")


def _experiment(client: MlflowClient, address: str, name: str) -> str:
    place = None
    if address.startswith("sqlite:///"):
        folder = Path(address.removeprefix("sqlite:///")).absolute().parent
        place = (folder / "mlflow-artifacts" / name).as_uri()
    for _ in range(2):
        if experiment := client.get_experiment_by_name(name):
            if experiment.lifecycle_stage == "deleted":
                client.restore_experiment(experiment.experiment_id)
            if KIND[0] not in experiment.tags:
                client.set_experiment_tag(experiment.experiment_id, *KIND)
            return experiment.experiment_id
        try:
            return client.create_experiment(name, place, dict([KIND]))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    raise Away(f"experiment {name}: another client creates and deletes it")
