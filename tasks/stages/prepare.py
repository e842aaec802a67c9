"""Stage prepare: rows, their tokens, the template and a report, for training and evaluation.

The model is an input because of its tokenizer; its weights are not fetched. The number of processes and the path of a
source are not part of the identity.
"""

import json
from pathlib import Path
from typing import Any

from prefect import State, task
from prefect.artifacts import create_markdown_artifact

from conf.rules import layout, objectives, reinforcement
from conf.rules.sequences import lacking
from conf.schema import identity
from conf.schema.data import Data, Part
from conf.schema.run import Run
from contract import checksums, regular_files
from contract.faults import Fault, named
from tasks.pages import data_report
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.places import runs_folder
from tasks.run.progress import Progress, newest
from tasks.run.session import OPTIONS, StageRun
from tasks.sources import row_sources
from tasks.sources.hub import file_choice
from tasks.store import Store

VERSION = 2
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def stage(run: Run, model: Stage, source: str = "data.source") -> Stage:
    """Return the stage of a run's data. `source` is the key of a single source: reinforce.source for prompts."""
    data = run.data
    if not data.parts:
        raise Fault(f"{source}: required by the flow: a Hub data set, files, s3://... or tiny://tickets")
    config = identity.flat(run, "prepare")
    if data.template.endswith(".jinja"):
        config["template"] = _template(data.template)
    if data.packed:
        config["multiple"] = layout.packing_multiple(run.layout)
    memory = runs_folder() / "cache/digests.json"
    config["sources"] = [
        identity.of_section(part if data.mixture else data, "source") | row_sources.identity(part, key, memory)
        for key, part in _parts(data, source)
    ]
    return Stage("prepare", VERSION, config, {"model": model.fingerprint})


@task(name="prepare", **OPTIONS)
def prepare(stage_run: StageRun, model: Artifact) -> State:
    """Prepare the data."""

    def make(work: Work) -> dict:
        run, files = _here(stage_run, model, work), work.files
        require_unchanged(stage_run.run.data, stage_run.asked)
        told, bar = files.with_name("files-preparing") / "progress.jsonl", Progress("prepare", "bytes")
        command, stop = launch.trainer("prepare", run, work.folder), stage_run.stopped(work)
        # prepare reads data sets from the Hub, with the user's token
        launch.process(*command, work.say, stop, lambda: bar.update(*newest(told, "done", "total")), HUB_TOKENS)
        require_unchanged(stage_run.run.data, stage_run.asked)  # the fingerprint names these sources
        report = json.loads((files / "report.json").read_text("utf-8"))
        tracked = stage_run.tracked()
        tracked.drawn(files / "report.json", "report.json", "data")
        for name, rows in data_report.tables(report).items():
            tracked.table(rows, f"{name}.json")
        made = json.loads((files / "prepared.json").read_text("utf-8"))
        return {key: made[key] for key in ("kind", "rows", "sequences")} | data_report.numbers(report)

    def require(made: Artifact) -> None:
        publish(stage_run.store, made, stage_run.run.name + stage_run.name.removeprefix("prepare"))
        if stage_run.trains and stage_run.name == "prepare":
            require_enough(stage_run.run, made)
        prompts = "prepare-prompts" if stage_run.run.reinforce.source else "prepare"
        if stage_run.reinforces and stage_run.name == prompts:
            require_prompts(stage_run.run, made)

    return stage_run.get_or_make(make, require=require)


def require_enough(run: Run, made: Artifact) -> None:
    """Raise a Fault for data that training cannot use, or too few rows, before GPUs cost money."""
    if refused := objectives.unfit(run, made.key, made.result["kind"]):
        raise Fault(refused)
    if lacks := lacking(run, made.key, *(made.result[key] for key in ("kind", "rows", "sequences"))):
        raise Fault(lacks)


def require_prompts(run: Run, made: Artifact) -> None:
    """Raise a Fault for data without prompts, before GPUs cost money."""
    if refused := reinforcement.unfit(run, made.key, made.result["kind"]):
        raise Fault(refused)


def publish(store: Store, made: Artifact, name: str) -> None:
    """Publish the report as a page in Prefect, also for cached data."""
    if found := store.read(f"{made.key}/files/report.json"):
        page = data_report.page(json.loads(found[0]), f"{name}: data", store.link(f"{made.key}/files"))
        create_markdown_artifact(page, key=f"data-{name}", description=made.key)


def require_unchanged(data: Data, asked: Stage) -> None:
    """Raise a Fault for local files that have changed. Other sources are pinned, or compared when they are fetched."""
    if data.template.endswith(".jinja") and _template(data.template) != asked.config["template"]:
        raise Fault(f"data.template: {data.template}: has changed since the run began; start it again")
    for (key, part), found in zip(_parts(data), asked.config["sources"], strict=True):
        if "content" in found:
            now = row_sources.identity(part, key, runs_folder() / "cache/digests.json")
            if now["content"] != found["content"]:
                raise Fault(f"{key}: {part.source}: has changed since the run began; start it again")


def _parts(data: Data, source: str = "data.source") -> list[tuple[str, Part]]:
    """Return the sources, each with its key."""
    if not data.mixture:
        return [(source, part) for part in data.parts]
    for number, part in enumerate(data.mixture):
        if not part.source:
            raise Fault(f"data.mixture[{number}].source: required: a Hub data set, files, s3://... or tiny://tickets")
    return [(f"data.mixture[{number}].source", part) for number, part in enumerate(data.mixture)]


def _here(stage_run: StageRun, model: Artifact, work: Work) -> Run:
    """Return the run with local paths of its sources and its tokenizer."""
    fetched = Progress("fetch-data", "bytes").update
    parts = [
        row_sources.local(part, found, key, work.folder / f"source-{number}", fetched)
        for number, ((key, part), found) in enumerate(
            zip(_parts(stage_run.run.data), stage_run.asked.config["sources"], strict=True)
        )
    ]
    tokenizer = work.folder / "tokenizer"
    weights = {".safetensors", *file_choice.PICKLES}
    small = {name: file for name, file in model.files.items() if Path(name).suffix.lower() not in weights}
    stage_run.store.get(f"{model.key}/files", small, tokenizer)
    run = stage_run.at(work, model=tokenizer, data=work.files)
    changes: dict[str, Any] = {"mixture": tuple(parts)}
    if not run.data.mixture:
        changes = {"source": parts[0].source, "revision": parts[0].revision}
    return run.changed(data=changes)


def _template(name: str) -> str:
    """Return the digest of a Jinja file as the template's identity, which does not include the path."""
    with named("data.template"):
        return f"sha256:{checksums.of(regular_files.read(Path(name).expanduser()))}.jinja"
