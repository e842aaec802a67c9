"""Stage reference: what another model says of the rows, once for all trainings on them.

For dpo that model is the base, for distill the teacher. The layout bears no identity here either, nor does anything of
the optimizer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from prefect import State, task

from conf.schema import identity
from conf.schema.run import Run
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.progress import Progress, newest
from tasks.run.stage_run import OPTIONS, StageRun

VERSION = 1


def stage(run: Run, base: Stage, data: Stage, teacher: Stage | None = None) -> Stage:
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    inputs |= {"teacher": teacher.fingerprint} if teacher else {}
    return Stage("reference", VERSION, identity.of(run, "reference"), inputs)


@task(name="reference", **OPTIONS)
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
        run, bar = stage_run.at(**paths), Progress("reference", "rows")
        rows = sum(data.result["rows"][split] for split in ("training", "validation"))
        told = files / "progress.jsonl"
        launch.trainer(
            "reference",
            run,
            work.folder,
            work.say,
            stage_run.stopped(work),
            lambda: bar.update(newest(told, "done")[0], rows),
            turn=stage_run.turn(work.say),
        )
        return {"rows": rows}

    return stage_run.get_or_make(make)
