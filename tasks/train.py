"""Stage: training, by Megatron-Bridge in processes of its own, from the newest complete checkpoint.

The layout bears no identity: losses are the same at every layout (README, Layouts), but for adapters that all experts
of a rank share. Neither do recomputation, kernels, logging, and how often a checkpoint is saved.
"""

import re
import time

from prefect import State, task

from conf.schema import Run
from tasks import launch
from tasks.artifact import Artifact, Stage, Work
from tasks.gang import controller, page
from tasks.progress import Progress, newest
from tasks.session import OPTIONS, Session
from tasks.tracking import plots

VERSION = 1
STEP_EVERY = 5.0  # seconds between lines of steps in the log

IDENTITY = {
    "model": {"mtp", "mtp_loss_scale"},
    "data": {"seq_length", "packed", "seed"},  # the rest is in the data's own identity
    "train": {"steps", "global_batch", "seed", "precision", "validate_every", "validate_batches", "stop_after"}
    | {"fp8", "fp8_weights"},
    "moe": {"aux_loss_coeff", "z_loss_coeff", "router_dtype", "freeze_router", "balance", "force_balance"},
    "checkpoint": {"save_optimizer", "keep"},
    "evaluate": {"parity_rows"},  # training writes down what it says of them
}
# Keys that came when there were artifacts already: by themselves they say what a run without them did.
YOUNGER = {("train", "fp8"), ("train", "fp8_weights"), ("optimizer", "states"), ("optimizer", "gradients")}


def stage(run: Run, base: Stage, data: Stage) -> Stage:
    config = run.model_dump(mode="json", include=IDENTITY)
    config |= run.model_dump(mode="json", include={"adapter", "optimizer"})
    for key in ("distributed", "offload"):
        del config["optimizer"][key]
    for section, key in YOUNGER:
        if config[section][key] == Run.model_fields[section].annotation.model_fields[key].default:
            del config[section][key]
    if run.adapter.kind != "none" and run.adapter.experts == "shared":
        config["layout"] = {"ep": run.layout.ep}
    return Stage("train", VERSION, config, {"base": base.fingerprint, "data": data.fingerprint})


@task(name="train", **OPTIONS)
def train(session: Session, model: Artifact, base: Artifact, data: Artifact) -> State:
    """Train with Megatron-Bridge."""

    def make(work: Work) -> dict:
        output = work.folder / "files"
        paths = {
            "model": session.local(model),
            "base": session.local(base),
            "data": session.local(data),
            "output": output,
            "parity": output / "parity.json",
            "logs": work.folder / "logs",
        }
        run = session.at(**paths)
        metrics = output / "metrics.jsonl"
        bar = Progress("train", "steps")
        tracked = session.tracked("train")
        tracked.follow(metrics)
        tracked.model(run.model.source, session.store.link(f"{model.key}/files"))
        for split, context in (("training", "training"), ("validation", "validation")):
            count = data.result["rows"][split]
            tracked.dataset(f"{run.name}-{split}", data.digest, session.store.link(f"{data.key}/files"), context, count)
        several = run.layout.nodes > 1 or run.gang.engine != "local"
        say, stop = _Thinned(work.say), session.stopped(work, fenced=several)

        def tick() -> None:
            bar.update(newest(metrics, "step")[0], run.train.steps)

        try:
            if several:
                gang = work.folder.name
                with page.told(session, run, gang, metrics) as teller:
                    controller.train(run, work.folder, session.store, gang, say, stop, tick, teller)
            else:
                launch.trainer("train", run, work.folder, say, stop, tick)
        finally:
            tracked.unfollow()
        lines = plots.read(metrics)
        if image := plots.figure("loss", lines):
            (output / "loss.png").write_bytes(image)
        return _summary(lines)

    return session.obtain("train", make)


class _Thinned:
    """Passes on all lines but most of those of single steps: the progress bar and MLflow have each of them."""

    def __init__(self, say):
        self.say, self.said = say, 0.0

    def __call__(self, line: str) -> None:
        if re.match(r"step \d+/\d+ ", line):
            if time.monotonic() - self.said < STEP_EVERY:
                return
            self.said = time.monotonic()
        self.say(line)


def _summary(lines: list[dict]) -> dict:
    steps = [line for line in lines if line["kind"] == "train"]
    validations = [line for line in lines if line["kind"] == "validation"]
    seconds = sorted(line["step_seconds"] for line in steps)
    summary = {"steps": steps[-1]["step"], "loss": steps[-1]["lm_loss"], "first_loss": steps[0]["lm_loss"]}
    summary |= {"median_step_seconds": seconds[len(seconds) // 2], "peak_memory_gb": steps[-1]["memory_gb"]}
    return summary | ({"validation_loss": validations[-1]["lm_loss"]} if validations else {})
