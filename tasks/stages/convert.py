"""Stage convert: the released model as training loads it, in the way of convert.to, with every tensor accounted for.

The result can be read at any layout. The flow's host converts, or with convert.hosts=all those of training together.
"""

from prefect import State, task

from conf.planner.stage_needs import on_one_host
from conf.rules import objectives
from conf.schema import identity
from conf.schema.run import Run
from tasks.gang import controller
from tasks.gang.history import prefect_page
from tasks.gang.history.timeline import History
from tasks.gang.job import conversion
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.stage_run import OPTIONS, StageRun

VERSION = 1


def stage(run: Run, model: Stage) -> Stage:
    config = identity.flat(run, "convert")
    if run.convert.to == "packed":
        config["base"] = run.model.base
        config |= {"pack": sorted(run.model.pack)} if run.model.pack else {}
    return Stage("convert", VERSION, config, {"model": model.fingerprint})


def stage_of_teacher(run: Run, model: Stage) -> Stage:
    return stage(objectives.of_teacher(run), model)


@task(name="convert", **OPTIONS)
def convert(stage_run: StageRun, model: Artifact) -> State:
    """Convert the release."""

    def make(work: Work) -> dict:
        paths = {"model": stage_run.local(model), "base": work.folder / "files", "logs": work.folder / "logs"}
        run, say = stage_run.at(**paths), work.say
        job = conversion(run)
        stop = stage_run.stopped(work, fenced=job is not None)
        if job:
            gang, store, metrics = work.folder.name, stage_run.store, work.folder / "files/metrics.jsonl"
            history, page = History(gang, run.name, stage_run.tracking.name), f"convert-{run.name}"
            with prefect_page.told(history, metrics, store, stage_run.tracked(), page) as teller:
                controller.carry_out(job, work.folder, store, gang, say, stop, teller=teller)
        elif run.layout.nodes > 1:
            launch.trainer("convert", on_one_host(run), work.folder, say, stop, changed={"CUDA_VISIBLE_DEVICES": ""})
        else:
            launch.trainer("convert", run, work.folder, say, stop, turn=stage_run.turn(say))
        return {}

    return stage_run.get_or_make(make)


convert_teacher = convert.with_options(name="convert-teacher")
