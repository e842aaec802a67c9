"""Servers for all flows of a session, and the whole pipeline once."""

from dataclasses import dataclass

import pytest

from tests.support import preloaded, toy_trainer
from tests.support.flow_world import World, world
from tests.support.toy_flows import LONG, Toys

# Of the 6 s of CPU time that a flow takes which finds a fault, 5 are imports. huggingface_hub is not among these: it
# reads HF_ENDPOINT when it is imported.
IMPORTS = """
import boto3, botocore.config, matplotlib.backends.backend_agg, matplotlib.figure, psutil
import prefect.flow_engine, prefect.runtime.flow_run, prefect.states, prefect.task_engine
import flows.run_command, tasks.stages.run_report, tasks.tracking.mlflow_sink
"""


@dataclass(frozen=True)
class Place(World):
    """A world where run() forks a process that has a flow's imports; start() starts python -m, as users do."""

    fork: preloaded.Preloaded

    def finish(self, *arguments: object, within: float, **environment: str) -> tuple[int, str]:
        done = self.fork("flows.finetune", self.conf, *arguments, merged=True, **environment)
        return done.code, done.output


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    with world(tmp_path_factory.mktemp("world")) as made, preloaded.python(IMPORTS, made.environment) as fork:
        yield Place(made.folder, made.environment, made.prefect, made.mlflow, fork)


@pytest.fixture(scope="session")
def first(place) -> str:
    """The whole pipeline, once, as a user starts it; what it printed."""
    return World(place.folder, place.environment, place.prefect, place.mlflow).run()


@pytest.fixture
def toys(place, tmp_path):
    """Flows with toys, on a host without GPUs."""
    toy_trainer.install(tmp_path)
    made = Toys(place, place.fork, tmp_path)
    yield made
    for flow in made.started:
        flow.kill()
        flow.wait(LONG)
