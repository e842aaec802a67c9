"""Stage: the released model in Megatron's torch_dist format, every tensor accounted for. Readable at any layout."""

from prefect import State, task

from conf.schema import Run
from tasks import launch
from tasks.artifact import Artifact, Stage, Work
from tasks.session import OPTIONS, Session

VERSION = 1


def stage(run: Run, model: Stage) -> Stage:
    config = {"precision": run.train.precision, "mtp": run.model.mtp}
    return Stage("convert", VERSION, config, {"model": model.fingerprint})


@task(name="convert", **OPTIONS)
def convert(session: Session, model: Artifact) -> State:
    """Convert to torch_dist."""

    def make(work: Work) -> dict:
        paths = {"model": session.local(model), "base": work.folder / "files", "logs": work.folder / "logs"}
        launch.trainer("convert", session.at(**paths), work.folder, work.say, session.stopped(work))
        return {}

    return session.obtain("convert", make)
