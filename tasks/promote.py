"""Stage: the tuned model in MLflow's registry: challenger always, champion when it is better; and why.

A version's source is the merged model's URI in the store, checked to be there whole. A champion is measured by the
value that its version carries as a tag; without a champion, the base model is the one to beat.
"""

import json
import warnings
from dataclasses import dataclass

from prefect import State, task

from conf.schema import Run
from tasks import artifact
from tasks.artifact import Artifact, Missing, Stage, Work
from tasks.faults import Fault
from tasks.session import OPTIONS, Session

VERSION = 1


@dataclass(frozen=True)
class Rival:
    """What has to be beaten."""

    name: str
    value: float | None  # of the metric; None where it was never measured


def stage(run: Run, tuned: Stage, before: Stage, after: Stage) -> Stage:
    config = run.promote.model_dump(mode="json")
    inputs = {"tuned": tuned.fingerprint, "before": before.fingerprint, "after": after.fingerprint}
    return Stage("promote", VERSION, config, inputs)


@task(name="promote", **OPTIONS)
def promote(session: Session, tuned: Artifact, before: Artifact, after: Artifact) -> State:
    """Register, and promote what is better."""
    settings = session.run.promote
    client = registry(session.tracking_uri)

    def make(work: Work) -> dict:
        if isinstance(there := artifact.find(tuned.stage, session.store), Missing):
            raise Fault(f"{tuned.result['uri']}: not registered: {there.reason}")
        base, value = _value(before, settings.metric), _value(after, settings.metric)
        champion = _by_alias(client, settings.model, "champion")
        rival = Rival("the base model", base)
        if champion:
            measured = champion.tags.get(settings.metric)
            rival = Rival(f"champion {champion.version}", float(measured) if measured is not None else None)
        wins, reason = decide(settings.metric, value, rival, settings.margin)
        version = _register(client, session, tuned, {settings.metric: repr(value), "reason": reason})
        client.set_registered_model_alias(settings.model, "challenger", version)
        if wins:
            client.set_registered_model_alias(settings.model, "champion", version)
        # Runs are forgotten in time; what the registry names stays (flows/artifacts.py).
        pin = {"artifacts": [tuned.key, before.key, after.key], "model": settings.model, "version": version}
        session.store.write(f"pins/{settings.model}-{version}.json", json.dumps(pin).encode())
        aliases = ["challenger", *(["champion"] if wins else [])]
        decision = {"model": settings.model, "version": version, "aliases": aliases, "reason": reason, "value": value}
        (work.folder / "files/decision.json").write_text(json.dumps(decision, indent=1))
        work.say(f"{settings.model} version {version} is {' and '.join(aliases)}: {reason}")
        return decision | {"uri": tuned.result["uri"]}

    return session.obtain("promote", make, valid=lambda made: _is_registered(client, made))


def decide(metric: str, value: float, rival: Rival, margin: float) -> tuple[bool, str]:
    """Whether it becomes champion, and why, for people."""
    if rival.value is None:
        return False, f"{rival.name} was never measured by {metric}, so nothing says that {value:.4g} is better"
    gain = value - rival.value
    compared = f"{metric} {value:.4g} against {rival.value:.4g} of {rival.name}: {gain:+.4g}"
    if gain > margin:
        return True, f"{compared}, above the margin of {margin:g}"
    return False, f"{compared}, not above the margin of {margin:g}"


def registry(uri: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that MLflow imports
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _value(evaluation: Artifact, metric: str) -> float:
    metrics = evaluation.result["metrics"]
    if metric not in metrics:
        raise Fault(f"promote.metric: {metric}: not among what was evaluated: {', '.join(sorted(metrics))}")
    return metrics[metric]


def _by_alias(client, model: str, alias: str):
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # no such model, no such alias
            return None
        raise


def _register(client, session: Session, tuned: Artifact, tags: dict[str, str]) -> str:
    """The version of this very model: an attempt that died after registering it left one behind."""
    from mlflow.exceptions import MlflowException

    name = session.run.promote.model
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = tags | {"finetune.fingerprint": tuned.stage.fingerprint, "finetune.digest": tuned.digest}
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.source == tuned.result["uri"] and version.tags.get("finetune.digest") == tuned.digest:
            for key, value in tags.items():
                client.set_model_version_tag(name, version.version, key, value)
            return version.version
    run_id = session.mlflow_run("train")
    return client.create_model_version(name, tuned.result["uri"], run_id=run_id, tags=tags).version


def _is_registered(client, made: Artifact) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        client.get_model_version(made.result["model"], made.result["version"])
    except MlflowException:
        return False
    return True
