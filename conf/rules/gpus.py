"""GPUs that each stage of a run takes, and on how many hosts: what the plan shows, and what a stage asks its host for.

    takes(run, "train") -> Share        GPUs of each host, on so many hosts
    beside(run, 8)                      whether the base is evaluated beside training on this host of 8 GPUs

contract/host_gpus.py gives single GPUs to stages; a stage has all that it takes or none. Stages that are not listed,
such as export, compute on CPUs.
"""

from dataclasses import dataclass

from conf.schema.run import Run


@dataclass(frozen=True)
class Share:
    """A stage's part of its hosts."""

    hosts: int
    gpus: int | None  # of each host; None = all that it has
    here: bool  # on the host of the flow; else where the stage's engine finds hosts

    def of(self, host: int) -> int:
        """GPUs that the stage takes of a host that has so many."""
        return host if self.gpus is None else min(host, self.gpus * self.members)

    @property
    def members(self) -> int:
        """Members on one host: an engine on the flow's own host has all of them there."""
        return self.hosts if self.here else 1


NONE = Share(1, 0, True)


def takes(run: Run, stage: str) -> Share:
    """The share of a stage of the flow, or of a command of the trainer."""
    layout, evaluate, engine = run.layout, run.evaluate, run.gang.engine
    if stage == "convert" and layout.nodes == 1:  # a model of several hosts is converted in this host's memory
        return Share(1, layout.gpus_per_node, True)
    if stage == "train":
        return Share(layout.nodes, layout.gpus_per_node, engine == "local")
    if stage.partition("-")[0] == "evaluate":
        nodes = evaluate.nodes or 1
        if nodes == 1 and evaluate.engine is None:
            return Share(1, evaluate.gpus, True)
        return Share(nodes, evaluate.gpus or layout.gpus_per_node, (evaluate.engine or engine) == "local")
    return NONE


def beside(run: Run, host: int) -> bool:
    """Whether the base is evaluated beside training, on a host of the flow that has so many GPUs.

    Without GPUs they are. On hosts of a scheduler the base comes first: it may be given the very hosts that training
    waits for, and a base that cannot be evaluated is to be found before the hours.
    """
    training, evaluation = takes(run, "train"), takes(run, "evaluate-base")
    if not (training.here and evaluation.here):
        return False
    return not host or training.of(host) + evaluation.of(host) <= host
