"""Stage reinforce: reinforcement learning from train's last checkpoint or the base, with vLLM next to Megatron."""

# pyright: reportArgumentType=false, reportCallIssue=false

import json
from pathlib import Path
from typing import Any

from prefect import State, task

from conf.rules import reinforcement as rules
from conf.schema import identity
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from tasks.pages import learning_pages
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.places import kernels_folder
from tasks.run.session import OPTIONS, StageRun, may_pass
from tasks.run.task_artifact import Page
from tasks.stages import export, train
from tasks.stages.run_job import Line, learn

VERSION = 1


def stage(run: Run, base: Stage, data: Stage, trained: Stage) -> Stage:
    config: dict[str, Any] = {**identity.of(run, "reinforce")}
    config |= rules.contents(run)
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    if run.reinforce.start == "trained":
        return Stage("reinforce", VERSION, config, inputs | {"trained": trained.fingerprint})
    return Stage("reinforce", VERSION, config | train.config_of(run, rules.as_training(run)), inputs)


# Retry after a crash too: learning resumes from its last checkpoint and journal.
@task(name="reinforce", **OPTIONS | {"retry_condition_fn": may_pass})
def reinforce(
    stage_run: StageRun, model: Artifact, base: Artifact, data: Artifact, trained: Artifact | None = None
) -> State:
    """Train on rewards of the model's own answers."""

    def make(work: Work) -> dict:
        if stage_run.pointless:
            raise Fault(f"not started: {stage_run.pointless}")
        paths = {"reinforced": work.files, "kernels": kernels_folder(), "output": trained or work.folder / "none"}
        require_unchanged(stage_run.run, stage_run.asked)
        export.require_step(rules.as_training(stage_run.run))
        run = stage_run.at(work, model=model, base=base, data=data, prompts=data, **paths)
        steps, updates, samples = run.reinforce.steps, run.reinforce.updates, work.files / "samples.jsonl"

        def page(lines: list[Line], picture: bytes | None) -> Page | None:
            if not (line := learning_pages.reinforcement_headline(lines, steps, updates)):
                return None
            links = stage_run.tracking.links(of_training=False)
            return learning_pages.reinforcement(
                run.name, lines, _samples(samples), steps, updates, picture, links
            ), line

        lines = learn(stage_run, work, run, "reinforcement", steps * updates, page)
        require_unchanged(stage_run.run, stage_run.asked)
        stage_run.tracked().table(_samples(samples), "samples.json")
        return _summary(lines, work.files / "reinforced.json")

    def valid(found: Artifact) -> bool:
        return export.is_usable(stage_run.run, found, rules.as_training)

    return stage_run.get_or_make(make, valid)


def require_unchanged(run: Run, asked: Stage) -> None:
    """Raise a Fault if a user's file has changed since the run began: the fingerprint has its content at that time."""
    for name, content in rules.contents(run).items():
        if content != asked.config[name]:
            place = getattr(run.reinforce, name)
            raise Fault(f"reinforce.{name}: {place}: has changed since the run began; start it again")


def _samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _summary(lines: list[dict], result: Path) -> dict:
    steps = [line for line in lines if line["kind"] == "reinforce"]
    found = {"steps": len(steps), "first_reward": steps[0]["reward"], "reward": steps[-1]["reward"]}
    found |= {"mismatch_max": max(line["mismatch"] for line in steps)}
    facts = json_object.read_or_empty(result)
    return found | {f"held_out_{when}": facts[when] for when in ("before", "after") if when in facts}
