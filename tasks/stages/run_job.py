"""Run a stage's trainer command: as a gang on several hosts, or on this host when its GPUs are free.

learn() also shows the metrics of a command that writes metrics.jsonl: a bar and a page in Prefect, curves in MLflow.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from conf.host import nvidia_smi
from conf.planner import hardware
from conf.planner.fewer_hosts import fewer_hosts, less_memory
from conf.rules import gpus
from conf.schema.run import Run
from tasks.gang import controller
from tasks.gang import job as jobs
from tasks.gang.attempt import Gang
from tasks.gang.engines import engine_of
from tasks.gang.history import prefect_page, spent, timeline
from tasks.gang.history.timeline import Attempt, History, Host, Teller
from tasks.gang.job import Job
from tasks.run import launch
from tasks.run.artifact import Work
from tasks.run.progress import Progress, newest
from tasks.run.session import StageRun
from tasks.run.task_artifact import LivePage, Page
from tasks.store import open_store
from tasks.tracking import plots

Line = dict[str, Any]  # of metrics.jsonl


def job_of(command: str, run: Run) -> Job | None:
    """Return the gang's job that runs the command; None if this host runs it."""
    return jobs.job_of(command, run, gpus.may_leave(run) and hardware.of(run).cuda and not nvidia_smi.visible())


def run_job(stage_run: StageRun, work: Work, command: str, run: Run, tick: Callable[[], None] = lambda: None) -> None:
    """Run `python -m trainer.COMMAND` to its end. Raise Fault, Broken or Stopped.

    The command ends early if the run is cancelled, or another process has taken over the work.
    """
    job = job_of(command, run)
    stop = stage_run.stopped(work, fenced=job is not None)
    metrics = work.folder / "files/metrics.jsonl"
    if job is None:
        grace = run.gang.grace if command in ("train", "reinforce") else launch.GRACE  # they save a checkpoint
        turn, arguments = stage_run.turn(work.say), launch.trainer(command, run, work.folder)
        history = History(work.folder.name, run.name, stage_run.tracking.name)
        with _attempt(Teller(history, metrics, work=work.folder), run, turn) as turn:
            launch.process(*arguments, work.say, stop, tick, turn=turn, grace=grace)
        return
    name, store, fits = work.folder.name, stage_run.store, fewer_hosts(job.run, job.trains)
    hasty, engine = open_store(store.uri, hasty=True), engine_of(job.run)
    history = History(name, run.name, stage_run.tracking.name)
    key = f"gang-{run.name}" if command == "train" else f"gang-{stage_run.name}-{run.name}"

    def spends(attempts: Sequence[Attempt]) -> dict[str, float]:
        return _spent(work, run, attempts).seconds if command == "train" else {}

    with prefect_page.reporting(history, metrics, store, stage_run.tracked(), key, work.folder, spends) as teller:

        def ticks() -> None:
            tick()
            teller.tick()

        gang = Gang(
            name, work.folder, job, hasty, engine, teller, work.say, stop, ticks, fits, less_memory, work.stored
        )
        if work.again:
            gang.copies.forget()
        controller.carry_out(gang)


@contextlib.contextmanager
def _attempt(teller: Teller, run: Run, turn: launch.Turn) -> Iterator[launch.Turn]:
    """Record an attempt on this host. Yield the turn that records when it has its GPUs."""
    assert teller.work
    teller.begins(1 + max((one.number for one in timeline.attempts(teller.work)), default=0))

    def has(taken: tuple[str, ...]) -> None:
        turn.has(taken)
        teller.joins((Host("", "", 0, 0, run.layout.gpus_per_node),))

    how = timeline.DONE
    try:
        yield replace(turn, has=has)
    except BaseException as error:
        how = (str(error) or type(error).__name__).partition("\n")[0]
        raise
    finally:
        teller.ends(how)


def time_spent(work: Work, run: Run) -> spent.Spent:
    """Return the time of a training so far, of all its attempts."""
    return _spent(work, run, timeline.attempts(work.folder))


def _spent(work: Work, run: Run, attempts: Sequence[Attempt]) -> spent.Spent:
    return spent.of(attempts, spent.read(work.files), run.layout.world)


def learn(
    stage_run: StageRun,
    work: Work,
    run: Run,
    kind: str,
    steps: int,
    page: Callable[[list[Line], bytes | None], Page | None],
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
            run_job(stage_run, work, stage_run.name, run, tick)
    finally:
        tracked.unfollow()
    lines = plots.read(metrics) if metrics.exists() else []
    if image := plots.together(lines, plots.TOGETHER[kind]):
        (work.files / f"{kind}.png").write_bytes(image)
    return lines
