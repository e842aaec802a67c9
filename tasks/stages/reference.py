"""Stage reference: what another model says of the rows, once for all trainings on them.

For dpo that model is what training starts from: the base, with model.adapter if there is one. For distill it is the
teacher. It is asked on the hosts of training. The layout bears no identity here either, nor does anything of the
optimizer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from prefect import State, task

from conf.rules import objectives
from conf.schema import identity
from conf.schema.run import Run
from tasks.gang import controller
from tasks.gang.history import prefect_page
from tasks.gang.history.timeline import History
from tasks.gang.job import reference as job_of
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.places import runs_folder
from tasks.run.progress import Progress, newest
from tasks.run.stage_run import OPTIONS, StageRun, may_pass
from tasks.sources import adapters

VERSION = 1


def stage(run: Run, base: Stage, data: Stage, teacher: Stage | None = None) -> Stage:
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    inputs |= {"teacher": teacher.fingerprint} if teacher else {}
    config = identity.of(run, "reference")
    if run.model.adapter and objectives.has_starting_adapter(run):
        config["model"] = config.get("model", {}) | {"adapter": adapters.identity(run.model.adapter, runs_folder())}
    return Stage("reference", VERSION, config, inputs)


# Rows that what crashed has asked of are not asked again.
@task(name="reference", **OPTIONS | {"retry_condition_fn": may_pass})
def reference(
    stage_run: StageRun, model: Artifact, base: Artifact, data: Artifact, teacher: Artifact | None = None
) -> State:
    """Ask the reference of the rows."""

    def make(work: Work) -> dict:
        files = work.folder / "files"
        paths = {
            "model": stage_run.local(model),
            "teacher_base" if teacher else "base": stage_run.local(base),
            "data": stage_run.local(data),
            "reference": files,
            "output": work.folder / "none",
            "logs": work.folder / "logs",
        }
        paths |= {"teacher": stage_run.local(teacher)} if teacher else {}
        run, bar, say = stage_run.at(**paths), Progress("reference", "rows"), work.say
        if objectives.has_starting_adapter(run):
            run = adapters.as_found(run, stage_run.asked.config, work.folder / "adapter", runs_folder())
        rows = sum(data.result["rows"][split] for split in ("training", "validation"))
        told, job = files / "progress.jsonl", job_of(run)
        stop = stage_run.stopped(work, fenced=job is not None)

        def tick() -> None:
            bar.update(newest(told, "done")[0], rows)

        if job:
            gang, store = work.folder.name, stage_run.store
            history, page = History(gang, run.name, stage_run.tracking.name), f"reference-{run.name}"
            with prefect_page.told(history, files / "metrics.jsonl", store, stage_run.tracked(), page) as teller:
                controller.carry_out(job, work.folder, store, gang, say, stop, tick, teller)
        else:
            launch.trainer("reference", run, work.folder, say, stop, tick, turn=stage_run.turn(say))
        return {"rows": rows}

    return stage_run.get_or_make(make)
