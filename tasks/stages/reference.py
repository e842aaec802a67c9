"""Stage reference: another model's log-probabilities of the rows, computed once for all trainings on these rows.

For dpo, this model is the start of training: the base, with model.adapter if it is set. For distill, it is the teacher.
The stage runs on the hosts of training. Layout and optimizer are not part of the identity.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from prefect import State, task

from conf.rules import objectives
from conf.schema import identity
from conf.schema.run import Run
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.progress import Progress, newest
from tasks.run.session import OPTIONS, StageRun, may_pass
from tasks.sources import adapters
from tasks.stages.run_job import run_job

VERSION = 1


def stage(run: Run, base: Stage, data: Stage, teacher: Stage | None = None) -> Stage:
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    inputs |= {"teacher": teacher.fingerprint} if teacher else {}
    config = identity.of(run, "reference")
    if run.model.adapter and objectives.has_starting_adapter(run):
        config["model"] = config.get("model", {}) | {"adapter": adapters.identity(run.model.adapter)}
    return Stage("reference", VERSION, config, inputs)


# A retry after a crash skips the rows that are done.
@task(name="reference", **OPTIONS | {"retry_condition_fn": may_pass})
def reference(
    stage_run: StageRun, model: Artifact, base: Artifact, data: Artifact, teacher: Artifact | None = None
) -> State:
    """Compute the reference model's log-probabilities of the rows."""

    def make(work: Work) -> dict:
        paths = {"model": model, "data": data, "reference": work.files, "output": work.folder / "none"}
        paths |= {"teacher_base": base, "teacher": teacher} if teacher else {"base": base}
        run, bar = stage_run.at(work, **paths), Progress("reference", "rows")
        if objectives.has_starting_adapter(run):
            run = adapters.as_found(run, stage_run.asked.config, work.folder / "adapter")
        rows = sum(data.result["rows"][split] for split in ("training", "validation"))
        done = work.files / "progress.jsonl"
        run_job(stage_run, work, "reference", run, lambda: bar.update(newest(done, "done")[0], rows))
        return {"rows": rows}

    return stage_run.get_or_make(make)
