"""Stage download: the files of the released model at one commit, or a model with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from prefect import State, task

from conf import families
from conf.schema import identity
from conf.schema.model import CONFIG, Drawn
from conf.schema.run import Run
from contract.faults import Fault
from tasks.run import launch
from tasks.run.artifact import Stage, Work
from tasks.run.progress import Progress
from tasks.run.session import OPTIONS, StageRun
from tasks.sources import adapters, drawn, hub
from tasks.sources.hub import file_choice

VERSION = 1
KEY = "model.merge_adapter"


def stage(run: Run) -> Stage:
    """Return the stage at the current commit or content of the source.

    The content of a folder is part of the identity; its path is not.
    """
    model = run.model
    merged = {"merge_adapter": adapters.identity(model.merge_adapter, KEY)} if model.merge_adapter else {}
    outside: dict[str, Any] = {"family": families.digest(model.family)} if model.family else {}
    if isinstance(model.source, Drawn):
        return Stage("download", VERSION, drawn.identity(model, run.train.seed) | outside)
    kind = hub.kind(model.source)
    if kind == "tiny":
        return Stage("download", VERSION, {"source": model.source} | outside | merged)
    config = identity.flat(run, "download") | {"commit": hub.resolve(model.source, model.revision).commit}
    return Stage("download", VERSION, config | merged | ({} if kind == "folder" else {"source": model.source}))


@task(name="download", **OPTIONS)
def download(stage_run: StageRun) -> State:
    """Fetch the released model, or make a model with random weights."""
    model, config = stage_run.run.model, stage_run.asked.config

    def make(work: Work) -> dict:
        if not model.merge_adapter:
            return fetched(work, work.files)
        released, adapter = work.folder / "released", work.folder / "adapter"
        result = fetched(work, released)
        adapters.fetch(model.merge_adapter, config["merge_adapter"], adapter, KEY)
        _make_once(stage_run, work, work.files, "weights.adopted", released, work.files, "--adapter", adapter)
        shutil.rmtree(released)
        return result | {"merged": model.merge_adapter}

    def fetched(work: Work, files: Path) -> dict:
        """Fetch the model into the folder, in a release's form."""
        if isinstance(model.source, Drawn):
            _draw(stage_run, work, files)
            return {"source": str(model.source)}
        if model.source.startswith("tiny://"):
            _make_once(
                stage_run, work, files, "tiny", model.source.removeprefix("tiny://"), files, "--dtype", "float32"
            )
            return {"source": model.source}
        found = hub.resolve(model.source, config["commit"] if hub.kind(model.source) == "hub" else "main")
        if found.commit != config["commit"]:
            raise Fault(f"{model.source}: its files have changed since the run began; start it again")
        file_choice.require_tokenizer(model.source, found.files)
        progress = Progress("download", "bytes")
        chosen, _ = file_choice.choose(found.files, model.unsafe_weights, model.trust_remote_code)
        place = work.folder / "checkpoint" if file_choice.are_adopted(chosen) else files
        result = hub.fetch(found, place, model.unsafe_weights, model.trust_remote_code, progress.update)
        if place != files:
            _make_once(stage_run, work, files, "weights.adopted", place, files)
            shutil.rmtree(place)
        return {"source": model.source, "commit": found.commit} | result

    return stage_run.get_or_make(make)


def _draw(stage_run: StageRun, work: Work, files: Path) -> None:
    """Make a model with random weights. The tokenizer comes from another model or from the folder of config.json."""
    model, config = stage_run.run.model, stage_run.asked.config
    described, tokenizer = work.folder / CONFIG, work.folder / "tokenizer"
    described.write_text(json.dumps(config["config"]))
    source = drawn.tokenizer_of(model)
    if hub.kind(source) == "tiny":
        _make_once(stage_run, work, tokenizer, "tiny", source.removeprefix("tiny://"), tokenizer)
    else:
        drawn.fetch_tokenizer(model, config["tokenizer"], tokenizer)
    options = ("--tokenizer", tokenizer, "--seed", config["seed"])
    _make_once(stage_run, work, files, "weights.drawn", described, files, *options)


def _make_once(stage_run: StageRun, work: Work, folder: Path, program: str, *arguments: object) -> None:
    """Run a program of the trainer that writes a folder, unless the folder exists: these folders are never partial."""
    if not any(folder.glob("*")):
        log = work.folder / f"{program.removeprefix('weights.')}.log"
        family = stage_run.run.model.family
        changed = {families.PLACE: family} if family else {}
        command = [f"trainer.{program}", *map(str, arguments)]
        launch.process(command, log, work.say, stage_run.stopped(work), changed=changed)
