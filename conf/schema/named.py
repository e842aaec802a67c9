"""Names of things that a key chooses: objectives, engines, networks and work pools. Each name stands only here.

Installed packages add objectives and engines by the entry points of their groups. They are searched for a name that
this project does not have.
"""

import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

OBJECTIVES = ("sft", "dpo", "distill")  # a file each in conf/rules/objectives/ and trainer/objectives/
OBJECTIVE_GROUP = "finetune.objectives"
HERE = "local"  # the engine that starts all members on this host
WORKERS = "prefect"  # the engine of hosts that each have a worker
KUBERNETES = "kubernetes"
SUBMITTING = ("slurm", KUBERNETES)  # engines that submit a text, which flows/gang.py prints
LAUNCHERS = ("dstack", "skypilot")  # programs that rent hosts; a template each in tasks/gang/launchers/
ENGINES = (HERE, WORKERS, *SUBMITTING)  # a file each in tasks/gang/engines/
ENGINE_GROUP = "finetune.engines"
NETWORKS = ("ib-h100", "roce", "efa-p5", "efa-p6-b200", "nvl72", "ethernet")  # the presets of conf/network.py
NODES_POOL = "finetune-nodes"  # a worker on each host of a run over several
POOLS = {"cpu": "finetune-cpu", "gpu": "finetune-gpu", "nodes": NODES_POOL}  # Prefect's work pools


def plugin(group: str, name: str) -> Any:
    """Return what the entry point of this name loads, or None."""
    return next((entry.load() for entry in importlib.metadata.entry_points(group=group, name=name)), None)


def submitting() -> list[str]:
    """Names of engines that submit a text, and those of installed packages, which may."""
    return [*SUBMITTING, *sorted(importlib.metadata.entry_points(group=ENGINE_GROUP).names)]


def _one_of(own: tuple[str, ...], group: str) -> Any:
    def known(name: str) -> str:
        if name not in own and not importlib.metadata.entry_points(group=group, name=name):
            listed = [repr(one) for one in (*own, *sorted(importlib.metadata.entry_points(group=group).names))]
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(listed[:-1])} or {listed[-1]}"})
        return name

    return Annotated[str, AfterValidator(known), WithJsonSchema({"enum": [*own], "type": "string"})]


if TYPE_CHECKING:
    Objective = Engine = Network = str
else:
    Objective = _one_of(OBJECTIVES, OBJECTIVE_GROUP)
    Engine = _one_of(ENGINES, ENGINE_GROUP)
    Network = Literal[*NETWORKS]
