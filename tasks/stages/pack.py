"""Stage pack: the codes of a packed base in a format that vLLM reads, for every evaluation and server of that base."""

from prefect import State, task

from conf.planner.stage_needs import on_one_host
from conf.rules import packed_base
from conf.schema.run import Run
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.session import OPTIONS, StageRun

VERSION = 1


def stage(run: Run, model: Stage, base: Stage) -> Stage:
    return Stage("pack", VERSION, {}, {"model": model.fingerprint, "base": base.fingerprint})


@task(name="pack", **OPTIONS)
def pack(stage_run: StageRun, model: Artifact, base: Artifact) -> State:
    """Write the codes of the base for vLLM."""

    def make(work: Work) -> dict:
        run = on_one_host(packed_base.of_pack(stage_run.at(work, model=model, base=base, export=work.files)))
        launch.process(*launch.trainer("export", run, work.folder), work.say, stage_run.stopped(work))
        return {}

    return stage_run.get_or_make(make)
