"""GPUs that each stage of a run takes, and on how many hosts: what the plan shows, and what a stage asks its host for.

    takes(run, "train") -> Share        GPUs of each host, on so many hosts
    beside(run, 8)                      whether the base is evaluated beside training on this host of 8 GPUs
    may_leave(run)                      whether evaluations go to the hosts of training where the flow's has no GPUs

conf/host/gpu_locks.py gives single GPUs to stages; a stage has all that it takes or none. Stages that are not listed,
such as export, compute on CPUs. So does convert; over the hosts of training it has them with their GPUs all the same.
"""

from dataclasses import dataclass

from conf.rules import reinforcement
from conf.schema.named import HERE
from conf.schema.run import Run


@dataclass(frozen=True)
class Share:
    """A stage's part of its hosts."""

    hosts: int
    gpus: int | None  # of each host; None = all that it has
    engine: str | None = None  # that starts its members; None = the host of the flow runs the command itself

    @property
    def here(self) -> bool:
        """Whether it is on the host of the flow, and not where its engine finds hosts."""
        return self.engine in (None, HERE)

    def of(self, host: int) -> int:
        """GPUs that the stage takes of a host that has so many."""
        return host if self.gpus is None else min(host, self.gpus * self.members)

    @property
    def members(self) -> int:
        """Members on one host: an engine on the flow's own host has all of them there."""
        return self.hosts if self.here else 1


NONE = Share(1, 0)


def takes(run: Run, stage: str, leaves: bool = False) -> Share:
    """The share of a stage of the flow, or of a command of the trainer.

    `leaves` says that the flow's host has no GPUs, and the run needs some: its evaluations leave it if they may.
    """
    layout, evaluate, engine = run.layout, run.evaluate, run.gang.engine
    alone = layout.nodes == 1 and engine == HERE
    spread = stage.partition("-")[0] == "convert" and run.convert.hosts == "all" and not alone
    if stage in ("train", "reference") or spread:
        return Share(layout.nodes, layout.gpus_per_node, None if alone else engine)
    if stage == "reinforce":
        asked = run.reinforce
        elsewhere = asked.hosts or reinforcement.in_turn(run) or run.hardware.gpu == "cpu"
        # Only the first host has engines behind its training, but a gang's hosts are asked for with as many GPUs each.
        own = 0 if elsewhere else asked.engines * asked.engine_gpus
        several = asked.hosts or not alone
        return Share(layout.nodes + asked.hosts, layout.gpus_per_node + own, engine if several else None)
    if stage.partition("-")[0] == "evaluate":
        nodes = evaluate.nodes or 1
        if nodes == 1 and evaluate.engine is None and not (leaves and may_leave(run)):
            return Share(1, evaluate.gpus)
        return Share(nodes, evaluate.gpus or layout.gpus_per_node, evaluate.engine or engine)
    return NONE


def may_leave(run: Run) -> bool:
    """Whether an evaluation, which the flow's host would make, is sent to a host of training if that has no GPUs."""
    return (run.evaluate.nodes or 1) == 1 and run.evaluate.engine is None and run.gang.engine != HERE


def beside(run: Run, host: int) -> bool:
    """Whether the base is evaluated beside training, on a host of the flow that has so many GPUs.

    Without GPUs they are. On hosts of a scheduler the base comes first: it may be given the very hosts that training
    waits for, and a base that cannot be evaluated is to be found before the hours.
    """
    training, evaluation = takes(run, "train"), takes(run, "evaluate-base")
    if not (training.here and evaluation.here):
        return False
    return not host or training.of(host) + evaluation.of(host) <= host
