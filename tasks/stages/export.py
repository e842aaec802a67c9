"""Stage export: the trained model in Hugging Face's formats: merged, for any server, and the adapter by itself."""

from prefect import State, task

from conf.schema import identity
from conf.schema.run import Run
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.session import OPTIONS, Session
from tasks.stages.convert import on_one_host

VERSION = 1


def stage(run: Run, model: Stage, trained: Stage) -> Stage:
    config = identity.flat(run, "export") | {"formats": list(run.export.formats or ()) or None}
    return Stage("export", VERSION, config, {"model": model.fingerprint, "trained": trained.fingerprint})


@task(name="export", **OPTIONS)
def export(session: Session, model: Artifact, base: Artifact, trained: Artifact) -> State:
    """Merge, and export to Hugging Face format."""

    def make(work: Work) -> dict:
        paths = {
            "model": session.local(model),
            "base": session.local(base),
            "output": session.local(trained),
            "export": work.folder / "files",
            "logs": work.folder / "logs",
        }
        run = session.at(**paths)
        run = on_one_host(run) if run.layout.nodes > 1 else run  # whose processes share the files among them
        launch.trainer("export", run, work.folder, work.say, session.stopped(work))
        return {"uri": session.store.link(f"{session.stages['export'].key}/files/merged")}

    return session.get_or_make("export", make)
