"""Run a stage's trainer command: as a gang on several hosts, or on this host when its GPUs are free.

learn() also shows the metrics of a command that writes metrics.jsonl: a bar and a page in Prefect, curves in MLflow.
"""

from collections.abc import Callable
from typing import Any

from conf.host import nvidia_smi
from conf.planner import hardware
from conf.planner.fewer_hosts import fewer_hosts, less_memory
from conf.rules import gpus
from conf.schema.run import Run
from tasks.gang import controller
from tasks.gang.history import prefect_page
from tasks.gang.history.timeline import History
from tasks.gang.job import Job, conversion, evaluation, reference, reinforcement, training
from tasks.run import launch
from tasks.run.artifact import Work
from tasks.run.progress import Progress, newest
from tasks.run.session import StageRun
from tasks.run.task_artifact import LivePage, Page
from tasks.tracking import plots

Line = dict[str, Any]  # of metrics.jsonl
JOBS = {"convert": conversion, "reference": reference, "reinforce": reinforcement}


def job_of(command: str, run: Run) -> Job | None:
    """Return the gang's job that runs the command; None if this host runs it."""
    if command == "train":
        return training(run) if gpus.takes(run, "train").engine else None
    if command == "evaluate":
        return evaluation(run, gpus.may_leave(run) and hardware.of(run).cuda and not nvidia_smi.visible())
    return JOBS[command](run)


def run_job(
    stage_run: StageRun,
    work: Work,
    command: str,
    run: Run,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run `python -m trainer.COMMAND` to its end. Raise Fault, Broken or Stopped.

    The command ends early if the run is cancelled, another process has taken over the work, or `stop` returns True.
    """
    say, job = say or work.say, job_of(command, run)
    stopped = stage_run.stopped(work, fenced=job is not None)

    def ends() -> bool:
        return stopped() or stop()

    if job is None:
        launch.trainer(command, run, work.folder, say, ends, tick, turn=stage_run.turn(say))
        return
    gang, store, fits = work.folder.name, stage_run.store, fewer_hosts(job.run, job.trains)
    history = History(gang, run.name, stage_run.tracking.name)
    metrics = work.folder / "files/metrics.jsonl"
    key = f"gang-{run.name}" if command == "train" else f"gang-{stage_run.name}-{run.name}"
    with prefect_page.reporting(history, metrics, store, stage_run.tracked(), key) as teller:
        controller.carry_out(job, work.folder, store, gang, say, ends, tick, teller, fits, less_memory)


def learn(
    stage_run: StageRun,
    work: Work,
    run: Run,
    kind: str,
    steps: int,
    page: Callable[[list[Line], bytes | None], Page | None],
    say: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Line]:
    """Run a job that writes metrics, and return the lines of metrics. `page` makes a page from the lines and a picture.

    `kind` is training or reinforcement.
    """
    metrics, bar, tracked = work.files / "metrics.jsonl", Progress(stage_run.name, "steps"), stage_run.tracked()

    def live() -> Page | None:
        lines = plots.read(metrics)
        return page(lines, plots.together(lines, plots.TOGETHER[kind]))

    def tick() -> None:
        bar.update(newest(metrics, "step")[0], steps)

    tracked.follow(metrics)
    try:
        with LivePage(f"{kind}-{run.name}", live):
            run_job(stage_run, work, stage_run.name, run, tick, say, stop)
    finally:
        tracked.unfollow()
    lines = plots.read(metrics) if metrics.exists() else []
    if image := plots.together(lines, plots.TOGETHER[kind]):
        (work.files / f"{kind}.png").write_bytes(image)
    return lines
