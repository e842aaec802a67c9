"""Stage convert: the released model in the form that training loads (convert.to), and a check that no tensor is lost.
Every layout can read the result. The flow's host converts; with convert.hosts=all, all hosts of training convert.
"""

from prefect import State, task

from conf import families
from conf.planner.stage_needs import on_one_host
from conf.rules import gpus, packed_base
from conf.schema import identity
from conf.schema.run import Run
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.session import OPTIONS, StageRun
from tasks.stages.run_job import run_job

VERSION = 1


def stage(run: Run, model: Stage) -> Stage:
    config = identity.flat(run, "convert")
    if run.convert.to == "packed":
        config["base"] = run.model.base
        config |= {"pack": sorted(run.model.pack)} if run.model.pack else {}
        config |= packed_base.identity(run)
    if run.model.family:
        config["family"] = families.digest(run.model.family)
    return Stage("convert", VERSION, config, {"model": model.fingerprint})


@task(name="convert", **OPTIONS)
def convert(stage_run: StageRun, model: Artifact) -> State:
    """Convert the release."""

    def make(work: Work) -> dict:
        run = stage_run.at(work, model=model, base=work.files)
        if run.layout.nodes > 1 and gpus.takes(run, "convert").engine is None:  # without this host's GPUs
            run, stop, cpu = on_one_host(run), stage_run.stopped(work), {"CUDA_VISIBLE_DEVICES": ""}
            launch.process(*launch.trainer("convert", run, work.folder), work.say, stop, changed=cpu)
        else:
            run_job(stage_run, work, "convert", run)
        return {}

    return stage_run.get_or_make(make)
