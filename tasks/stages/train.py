"""Stage train: training by Megatron-Bridge in separate processes, from the newest complete checkpoint."""

# pyright: reportArgumentType=false, reportCallIssue=false

import re
import time
from dataclasses import replace
from typing import Any

from prefect import State, task

from conf.rules import auxiliary_losses, packed_base, schedule
from conf.schema import identity
from conf.schema.run import Run
from contract.faults import Fault, Stopped
from tasks.gang.history import spent
from tasks.gang.job import Job, Training
from tasks.pages import learning_pages
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.session import OPTIONS, StageRun, may_pass
from tasks.run.task_artifact import Page
from tasks.sources import adapters, released_config
from tasks.stages import export
from tasks.stages.run_job import Line, job_of, learn, time_spent
from tasks.tracking import report_plots

PACKING = {"packed_loss": "packed_loss", "unpacked_loss": "unpacked_loss", "packing_cost": "cost"}
STEP_EVERY = 5.0  # seconds between lines of steps in the log


def stage(run: Run, base: Stage, data: Stage, reference: Stage | None = None) -> Stage:
    config = config_of(run, run)
    if run.model.adapter:
        config["model"] = config.get("model", {}) | {"adapter": adapters.identity(run.model.adapter)}
    if packed_base.format_of(run) and packed_base.once_rounded(run, released_config.read(run)):
        config["model"] |= {"codes": "as released"}  # earlier versions computed codes from rounded weights
    if packed_base.identity(run):
        config["model"] |= packed_base.identity(run)
    if run.adapter.kind != "none" and run.adapter.experts == "shared":
        # Each shared adapter counts once in the gradient norm (trainer/patches/expert_adapters.py): ep does not change
        # the model. Earlier versions were right for ep 1 only; ep 1 in the identity keeps their artifacts valid.
        config["layout"] = {"ep": 1}
    if run.checkpoint.keep_best:  # the best is one of the saved checkpoints
        config["checkpoint"] |= {"save_every": run.checkpoint.save_every}
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    inputs |= {"reference": reference.fingerprint} if reference else {}
    return Stage("train", identity.VERSION, config, inputs)


def config_of(run: Run, trained: Run) -> dict[str, dict[str, Any]]:
    """Return the keys of a training's identity. `trained` has the values that training uses."""
    config = identity.of(run, "train")
    for section, values in auxiliary_losses.identity(trained, released_config.read(run)).items():
        config[section] |= values
    return config


# Retry after a crash too: training resumes from its last checkpoint.
@task(name="train", **OPTIONS | {"retry_condition_fn": may_pass})
def train(
    stage_run: StageRun, model: Artifact, base: Artifact, data: Artifact, reference: Artifact | None = None
) -> State:
    """Train with Megatron-Bridge."""

    def resolved(run: Run) -> Run:
        rows, tokens = data.result["sequences"]["training"], data.result.get("tokens_training", 0)
        return schedule.resolved(run, schedule.sequences(run, data.result["kind"], rows, tokens))

    def valid(found: Artifact) -> bool:
        return stage_run.reinforces or export.is_usable(stage_run.run, found, resolved)

    def make(work: Work) -> dict:
        if stage_run.pointless:
            raise Fault(f"not started: {stage_run.pointless}")
        paths = {"output": work.files, "parity": work.files / "parity.json", "reference": reference}
        run = stage_run.at(work, model=model, base=base, data=data, **paths)
        run = resolved(adapters.as_found(run, stage_run.asked.config, work.folder / "adapter"))
        if not stage_run.reinforces:
            export.require_step(run)
        tracked, link = stage_run.tracked(), stage_run.store.link
        tracked.params(_counted(run))
        tracked.model(str(run.model.source), link(f"{model.key}/files"))
        for split in ("training", "validation"):
            rows = data.result["rows"][split]
            tracked.dataset(f"{run.name}-{split}", data.digest, link(f"{data.key}/files"), split, rows)

        def page(lines: list[Line], picture: bytes | None) -> Page | None:
            if not (line := learning_pages.training_headline(lines, run.train.steps)):
                return None
            if left := learning_pages.seconds_left(lines, run.train.steps):  # next to the curves on MLflow's page
                tracked.metrics({"progress/hours_left": left / 3600}, step=lines[-1]["step"])
            links = stage_run.tracking.links(of_training=True)
            so_far = spent.text(time_spent(work, run).seconds)
            return learning_pages.training(run.name, lines, run.train.steps, picture, links, so_far), line

        work = replace(work, say=_Thinned(work.say))
        try:
            lines = learn(stage_run, work, run, "training", run.train.steps, page)
        except Stopped:
            if stage_run.pointless:
                raise Fault(f"stopped: {stage_run.pointless}") from None
            raise
        if job_of("train", run) is None:
            require_done(Training(run))
        whole = time_spent(work, run)
        picture = report_plots.of_time(whole.seconds)
        (work.files / "time.png").write_bytes(picture)
        tracked.file(picture, "time.png")
        hours = {f"time/{name}_hours": seconds / 3600 for name, seconds in whole.seconds.items()}
        tracked.metrics(hours | {"time/effective": spent.effective(whole.seconds)})
        return _summary(lines) | {"seconds": whole.seconds, "gpu_seconds": whole.gpu_seconds}

    return stage_run.get_or_make(make, valid)


def require_done(job: Job) -> None:
    """Raise Broken if a signal ended the training early: it then saved a checkpoint and exited without an error."""
    if not job.is_done():
        where = f"step {job.newest()} of {job.run.train.steps}"
        raise launch.Broken(f"training was ended from outside at {where}; it can resume there")


def _counted(run: Run) -> dict[str, object]:
    """Return the numbers of steps in the run's schedule."""
    return {
        "schedule.steps": run.train.steps,
        "schedule.warmup_steps": run.optimizer.warmup_steps,
        "schedule.validate_every": run.train.validate_every,
        "schedule.save_every": run.checkpoint.save_every,
    }


class _Thinned:
    """Filter that drops most lines about single steps: the progress bar and MLflow have all of them."""

    def __init__(self, say):
        self.say, self.said = say, 0.0

    def __call__(self, line: str) -> None:
        if re.match(r"step \d+/\d+ ", line):
            if time.monotonic() - self.said < STEP_EVERY:
                return
            self.said = time.monotonic()
        self.say(line)


def _summary(lines: list[dict]) -> dict:
    steps = [line for line in lines if line["kind"] == "train" and line["lm_loss"] is not None]
    validations = [line for line in lines if line["kind"] == "validation"]
    seconds = sorted(line["step_seconds"] for line in steps)
    summary = {"steps": steps[-1]["step"], "loss": steps[-1]["lm_loss"], "first_loss": steps[0]["lm_loss"]}
    summary |= {"median_step_seconds": seconds[len(seconds) // 2], "peak_memory_gb": steps[-1]["memory_gb"]}
    summary |= {key: steps[-1][key] for key in ("skipped_steps", "nan_steps") if key in steps[-1]}
    for line in (line for line in lines if line["kind"] == "packing"):
        summary |= {key: line[name] for key, name in PACKING.items() if name in line}
    if validations:
        best = min(validations, key=lambda line: line["lm_loss"])
        summary["validation_loss"] = validations[-1]["lm_loss"]
        summary |= {"best_validation_loss": best["lm_loss"], "best_validation_step": best["step"]}
        if "rewards/accuracy" in validations[-1]:
            summary["validation_accuracy"] = validations[-1]["rewards/accuracy"]
        if "perplexity" in validations[-1]:
            summary["validation_perplexity"] = validations[-1]["perplexity"]
    return summary
