"""Stage promote: register the tuned model in MLflow. It always becomes challenger, and champion if it is better.

It is better if its gain over the base, and over the champion if one exists, is above promote.margin and above noise
(promote.confidence, tasks/stages/evidence.py). Without promote.confidence, it is compared with the base only if no
champion exists. The champion's value is a tag of its version. If the value was measured on other questions, for example
because the data have grown, the reason says so.
The source of a version is the URI of the merged model, which must be complete in the store. If only the adapter was
exported, the source is the adapter's URI, and the version's tags name the base.
"""

import contextlib
import functools
import json
import math
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from prefect import State, task

from conf.schema import identity
from conf.schema.run import Run
from conf.schema.sections import Promote
from contract.faults import Fault
from tasks.pages.markdown import render
from tasks.run import artifact
from tasks.run.artifact import Artifact, Missing, Stage, Work, canonical
from tasks.run.run_tracking import RunTracking
from tasks.run.session import OPTIONS, StageRun
from tasks.stages.evidence import Evidence, compare
from tasks.store import Store
from tasks.tracking.address import public, registry
from tasks.tracking.mlflow_pages import authorization

VERSION = 1
LOWER = ("perplexity", "bits_per_byte")  # metrics that end with these names: lower is better
HELD_OUT = re.compile(r"test\.(jsonl|bin)")  # the questions in prepared data
ASKED = "finetune.asked."  # prefix of the tag with the questions of a metric


@dataclass(frozen=True)
class Rival:
    """A model to beat."""

    name: str
    value: float | None  # of the metric; None if it was never measured
    evidence: Evidence | None = None  # for a gain over the rival; None if promote.confidence is 0


def stage(run: Run, tuned: Stage, before: Stage, after: Stage) -> Stage:
    asked = run.evaluate.tasks
    names_known = not any(task.endswith((".yaml", ".yml")) for task in asked)  # a task file contains its name
    if asked and names_known and not run.promote.metric.startswith(asked):  # mmlu also yields mmlu_anatomy/acc
        raise Fault(f"promote.metric: {run.promote.metric} is not a metric of evaluate.tasks: {', '.join(asked)}")
    inputs = {"tuned": tuned.fingerprint, "before": before.fingerprint, "after": after.fingerprint}
    return Stage("promote", VERSION, identity.flat(run, "promote"), inputs)


@task(name="promote", **OPTIONS)
def promote(
    stage_run: StageRun, tuned: Artifact, before: Artifact | None, after: Artifact, released: Artifact | None = None
) -> State:
    """Register the model, and promote it if it is better.

    `before` is None if the base has random weights, because such a base is not evaluated.
    """
    settings, tracking = stage_run.run.promote, stage_run.tracking

    def make(work: Work) -> dict:
        client = registry(tracking.uri)
        for what, needed in _needed(tuned, released).items():
            if isinstance(there := artifact.find(needed, stage_run.store), Missing):
                raise Fault(f"{tuned.result['uri']}: not registered: {what}{there.reason}")
        metric = settings.metric
        questions, value = _questions(metric, after, stage_run.store), _value(after, metric)
        find = functools.partial(client.get_model_version_by_alias, settings.model, "champion")
        champion = _unless_refused(find, "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # no such model or alias
        same = not champion or champion.tags.get(ASKED + metric, questions) == questions
        rivals = _rivals(settings, champion, before, after, stage_run.store, same)
        wins, reason = decide(metric, value, rivals, settings.margin, settings.confidence)
        if champion and _is(champion.tags, tuned):
            wins, reason = True, f"{metric} {value:.4g}; it was champion before"
        if champion and not same:
            name = rivals[0].name
            reason += f"; {name} was measured on other questions, so the comparison is uncertain"
        # With nan as its value, a champion could never be replaced.
        measured = {settings.metric: repr(value), ASKED + settings.metric: questions} if math.isfinite(value) else {}
        tags = measured | {"reason": reason}
        version = _register(client, settings.model, tracking, tuned, tags)
        told = description(stage_run.run, tuned, version, reason, tracking)
        client.update_model_version(settings.model, version, told)
        client.set_registered_model_alias(settings.model, "challenger", version)
        if wins:
            client.set_registered_model_alias(settings.model, "champion", version)
        # flows/artifacts.py keeps artifacts of registered versions, even if their runs are removed.
        keys = [made.key for made in (tuned, before, after) if made]
        pin, place = {"artifacts": keys, "model": settings.model, "version": version}, _pin(settings.model, version)
        # Without a new value, an existing pin stays: it names the evaluation of the version's value.
        if measured or not stage_run.store.read(place):
            stage_run.store.write(place, json.dumps(pin).encode())
        aliases = ["challenger", *(["champion"] if wins else [])]
        decision = {"model": settings.model, "version": version, "aliases": aliases, "reason": reason, "value": value}
        (work.folder / "files/decision.json").write_text(json.dumps(decision, indent=1))
        work.say(f"{settings.model} version {version} is {' and '.join(aliases)}: {reason}")
        return decision | {"uri": tuned.result["uri"]}

    return stage_run.get_or_make(make, valid=lambda made: _is_registered(tracking.uri, made, tuned))


def description(run: Run, tuned: Artifact, version: str, reason: str, tracking: RunTracking) -> str:
    """Describe the version in Markdown: the reason, the path, the sources, and how to serve the model."""
    where: dict[str, Any] = {"path": _path(tuned.result["uri"]), "flow": tracking.name, "prefect": tracking.prefect}
    return render("version", run=run, version=version, reason=reason, **where).strip()


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


def _needed(tuned: Artifact, released: Artifact | None) -> dict[str, Stage]:
    """Return the stages whose artifacts are needed to serve the model: an adapter also needs its base."""
    is_adapter = tuned.result["uri"] == tuned.result.get("adapter")
    return {"": tuned.stage} | ({"its base: ": released.stage} if is_adapter and released else {})


def _rivals(
    settings: Promote, champion: Any, before: Artifact | None, after: Artifact, store: Store, same_questions: bool
) -> list[Rival]:
    """Return the models to beat (the champion if one exists, and the base) with the evidence for a gain over each."""

    def rival(name: str, value: float | None, evaluation: Artifact | None, same_rows: bool = True) -> Rival:
        known = settings.confidence and value is not None
        return Rival(name, value, compare(settings.metric, evaluation, after, store, same_rows) if known else None)

    found = []
    if champion:
        evaluation = _evaluation(store, settings.model, champion.version)
        value = _number(champion.tags.get(settings.metric))
        found.append(rival(f"champion {champion.version}", value, evaluation, same_questions))
    if before and (settings.confidence or not champion):
        found.append(rival("the base model", _value(before, settings.metric), before))
    return found


def decide(
    metric: str, value: float, rivals: Sequence[Rival], margin: float, confidence: float = 0.0
) -> tuple[bool, str]:
    """Return whether the model is better than every rival and becomes champion, and the reason."""
    if not rivals:
        return math.isfinite(value), f"{metric} {value:.4g}; it is the first version, and started from random weights"
    found = [_beats(metric, value, rival, margin, confidence) for rival in rivals]
    return all(wins for wins, _ in found), "; ".join(reason for _, reason in found)


def _beats(metric: str, value: float, rival: Rival, margin: float, confidence: float) -> tuple[bool, str]:
    """Return whether the model is better than the rival, and the reason."""
    if not math.isfinite(value):
        against = "" if rival.value is None else f" against {rival.value:.4g} of {rival.name}"
        return False, f"{metric} {value}{against}, which cannot be compared"
    if rival.value is None:
        return False, f"{rival.name} was never measured by {metric}, so it is unknown whether {value:.4g} is better"
    apart = round(value - rival.value, 9)  # 0.4 is not 0.1 above 0.3 by more than 0.1
    gain = -apart if metric.endswith(LOWER) else apart
    compared = f"{metric} {value:.4g} against {rival.value:.4g} of {rival.name}: {apart:+.4g}"
    compared += " (less is better)" * metric.endswith(LOWER)
    if not gain > margin:
        return False, f"{compared}, not above the margin of {margin:g}"
    above = f"{compared}, above the margin of {margin:g}"
    seen = rival.evidence
    if not confidence or seen is None:
        return True, above
    if seen.chance is None:
        again = "--from-stage evaluate-base and --from-stage evaluate-tuned keep them, promote.confidence=0 needs none"
        return False, f"{compared}, and it is unknown whether that is noise: {seen.how}; {again}"
    rows, odds = f", {seen.shown}" * bool(seen.shown), f"({seen.how}, p {seen.chance:.2g} of {1 - confidence:.2g})"
    if seen.chance > 1 - confidence:
        return False, f"{compared}{rows}, within noise: challenger {odds}"
    return True, f"{above}{rows}, outside noise {odds}"


def _questions(metric: str, after: Artifact, store: Store) -> str:
    """Return the questions of the metric as text. Values with equal texts are comparable.

    Metrics that count tokens also depend on the tokenizer and the template. lm-eval's tasks are known by their names.
    """
    asked = after.stage.config.get("evaluate", {})
    if not metric.startswith("held_out/"):
        files = sorted(after.stage.config.get("task_files", {}).values())
        return canonical({"rows": asked.get("rows"), "seed": asked.get("seed"), "task_files": files})
    data = artifact.read(store, f"prepare/{after.stage.inputs['data']}")
    if data is None:
        raise Fault(
            f"prepare/{after.stage.inputs['data']}: the questions are no longer in the store; start the run again"
        )
    there = data.result["rows"]["test"]
    found = {"rows": min(asked.get("rows") or there, there)}
    rows = {name: file.sha256 for name, file in data.files.items() if HELD_OUT.fullmatch(name)}
    found |= rows or {"data": data.digest}
    if metric == "held_out/exact_match":
        return canonical(found | {"max_tokens": asked.get("max_tokens")})
    found |= {"template": [file.sha256 for name, file in data.files.items() if name == "template.json"]}
    found |= {"seq_length": data.stage.config["seq_length"]} if data.result["kind"] == "text" else {}  # of windows
    return canonical(found | {"model": data.stage.inputs.get("model")})


def _evaluation(store: Store, model: str, version: str) -> Artifact | None:
    """Return the evaluation of a registered version, the last artifact in its pin; None if another store has it."""
    pin = store.read(_pin(model, version))
    return artifact.read(store, json.loads(pin[0])["artifacts"][-1]) if pin else None


def _pin(model: str, version: str) -> str:
    return f"pins/{model}-{version}.json"


def _value(evaluation: Artifact, metric: str) -> float:
    metrics = evaluation.result["metrics"]
    if metric not in metrics:
        raise Fault(f"promote.metric: {metric}: not evaluated; the metrics are {', '.join(sorted(metrics))}")
    return metrics[metric]


def _number(tag: str | None) -> float | None:
    """Return the value of a version's tag; None if it is not a number, because users can edit tags."""
    try:
        value = float(tag or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _unless_refused(call: Callable[[], Any], *codes: str) -> Any:
    """Return the result of the call; None if MLflow refuses it with one of these codes."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code in codes:
            return None
        raise


def _register(client, name: str, tracking: RunTracking, tuned: Artifact, tags: dict[str, str]) -> str:
    """Register the model and return its version. If an earlier attempt registered it, update that version's tags."""
    _unless_refused(lambda: client.create_registered_model(name), "RESOURCE_ALREADY_EXISTS")
    tags = tags | {"finetune.fingerprint": tuned.stage.fingerprint} | _identity(tuned) | _parts(tuned)
    for version in client.search_model_versions(f"name = '{name}'"):
        if _is(version.tags, tuned):
            for key, value in tags.items():
                client.set_model_version_tag(name, version.version, key, value)
            return version.version
    uri, run_id = tuned.result["uri"], tracking.training_run()
    if tracking.uri.startswith("http"):  # a server refuses file:// URIs; the tag finetune.uri has the original
        uri = re.sub("^file:", "folder:", uri)
    return client.create_model_version(name, uri, run_id=run_id, tags=tags).version


def _identity(tuned: Artifact) -> dict[str, str]:
    return {"finetune.uri": tuned.result["uri"], "finetune.digest": tuned.digest}


def _parts(tuned: Artifact) -> dict[str, str]:
    """Return tags with the URIs of the adapter and its base, which serving needs."""
    return {f"finetune.{part}": tuned.result[part] for part in ("adapter", "base") if part in tuned.result}


def _is(tags: dict[str, str], tuned: Artifact) -> bool:
    return _identity(tuned).items() <= tags.items()


def _is_registered(uri: str, made: Artifact, tuned: Artifact) -> bool:
    """Return whether the registry has the model. A server gets a plain request: MLflow's client takes 2 s to import."""
    name, version = made.result["model"], made.result["version"]
    if uri.startswith("sqlite:///"):
        return _is_in_file(Path(uri.removeprefix("sqlite:///")), name, version, tuned)
    if not uri.startswith("http"):
        from mlflow.exceptions import MlflowException

        try:
            return _is(registry(uri).get_model_version(name, version).tags, tuned)
        except MlflowException:
            return False
    asked = {"name": name, "version": version}
    try:
        answer = httpx.get(f"{uri}/api/2.0/mlflow/model-versions/get", params=asked, headers=authorization())
    except httpx.HTTPError as error:
        raise Fault(f"MLflow's registry at {public(uri)} does not answer ({type(error).__name__})") from None
    if answer.status_code == 404:
        return False
    if answer.is_error:
        raise Fault(f"MLflow's registry at {public(uri)} answers {answer.status_code}; check MLFLOW_TRACKING_*")
    tags = answer.json()["model_version"].get("tags", ())
    return _is({tag["key"]: tag["value"] for tag in tags}, tuned)


def _is_in_file(database: Path, name: str, version: str, tuned: Artifact) -> bool:
    """Return whether MLflow's local database has the model. These two tables have not changed since MLflow 1."""
    query = "SELECT 1 FROM model_versions WHERE name = ? AND version = ? AND current_stage != 'Deleted_Internal'"
    tags = "SELECT key, value FROM model_version_tags WHERE name = ? AND version = ?"
    if not database.is_file():
        return False
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute(query, (name, version)).fetchone()
            there = dict(connection.execute(tags, (name, version)).fetchall())
        except sqlite3.OperationalError:  # the registry has no tables yet
            return False
    return found is not None and _is(there, tuned)
