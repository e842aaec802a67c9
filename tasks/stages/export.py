"""Stage export: the trained model in Hugging Face's formats: merged for any server, and the adapter alone."""

from collections.abc import Callable
from pathlib import Path

from prefect import State, task

from conf.planner.stage_needs import on_one_host
from conf.rules import schedule
from conf.schema import identity
from conf.schema.run import Run
from contract.checkpoints import MARK, step_folder
from contract.faults import Fault
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.session import OPTIONS, StageRun

VERSION = 1


def stage(run: Run, model: Stage, trained: Stage) -> Stage:
    config = identity.flat(run, "export") | {"formats": list(run.export.formats or ()) or None}
    return Stage("export", VERSION, config, {"model": model.fingerprint, "trained": trained.fingerprint})


def is_usable(run: Run, trained: Artifact, resolved: Callable[[Run], Run]) -> bool:
    """Return whether a stored training has the step to export, or this run would not save that step either."""
    step = run.export.checkpoint
    if not isinstance(step, int) or f"checkpoints/{step_folder(Path(), step)}/{MARK}" in trained.files:
        return True
    return not schedule.saves(resolved(run), step)


def require_step(run: Run) -> None:
    """Raise a Fault if this training would not save the step of export.checkpoint. The run's steps must be known."""
    step = run.export.checkpoint
    if isinstance(step, int) and not schedule.saves(run, step):
        every, last, keep = run.checkpoint.save_every, schedule.last_step(run), run.checkpoint.keep
        kept = f", and the newest {keep} stay (checkpoint.keep)" if keep else ""
        raise Fault(
            f"export.checkpoint: {step}, but checkpoints are saved every {every} steps up to {last} "
            f"(checkpoint.save_every){kept}"
        )


@task(name="export", **OPTIONS)
def export(stage_run: StageRun, model: Artifact, base: Artifact, trained: Artifact) -> State:
    """Merge, and export to Hugging Face format."""

    def make(work: Work) -> dict:
        run = stage_run.at(work, model=model, base=base, output=trained, export=work.files)
        run = on_one_host(run)  # its processes share the files
        launch.process(*launch.trainer("export", run, work.folder), work.say, stage_run.stopped(work))
        return _links(stage_run, work.files, f"{model.key}/files")

    return stage_run.get_or_make(make)


def _links(stage_run: StageRun, made: Path, released: str) -> dict[str, str]:
    """Return the URI of the merged model, or of the adapter if nothing was merged. An adapter also has its base's URI.

    `released` is the base's folder in the store.
    """
    link, exported, adapter = stage_run.store.link, f"{stage_run.asked.key}/files", (made / "adapter").is_dir()
    beside = {"adapter": link(f"{exported}/adapter"), "base": link(released)} if adapter else {}
    merged = (made / "merged").is_dir() or not adapter
    return {"uri": link(f"{exported}/merged") if merged else beside["adapter"]} | beside
