"""GPUs and hosts of each stage of a run, for the plan and for the stage's request to its host.

    takes(run, "train") -> Share        number of hosts, and GPUs of each
    beside(run, 8)                      whether the base is evaluated during training on this host of 8 GPUs
    may_leave(run)                      whether evaluations run on hosts of training if the flow's host has no GPUs

conf/host/gpu_locks.py assigns GPUs to stages; a stage gets all its GPUs or none. Stages without a rule here, such as
export, compute on CPUs. convert does so too, but over the hosts of training it occupies their GPUs.
"""

from dataclasses import dataclass

from conf.rules import reinforcement
from conf.schema.named import HERE
from conf.schema.run import Run


@dataclass(frozen=True)
class Share:
    """A stage's part of its hosts."""

    hosts: int
    gpus: int | None  # of each host; None = all
    engine: str | None = None  # that starts its members; None = the flow's host runs the command directly

    @property
    def here(self) -> bool:
        """Whether the stage runs on the flow's host, not on hosts of its engine."""
        return self.engine in (None, HERE)

    def of(self, host: int) -> int:
        """GPUs that the stage takes of a host with `host` GPUs."""
        return host if self.gpus is None else min(host, self.gpus * self.members)

    @property
    def members(self) -> int:
        """Members on one host: all of them if they run on the flow's host."""
        return self.hosts if self.here else 1


NONE = Share(1, 0)


def takes(run: Run, stage: str, leaves: bool = False) -> Share:
    """Return the share of a stage of the flow, or of a command of the trainer.

    `leaves` is whether the run needs GPUs and the flow's host has none: evaluations then run elsewhere if may_leave().
    """
    layout, evaluate, engine = run.layout, run.evaluate, run.gang.engine
    alone = layout.nodes == 1 and engine == HERE
    spread = stage.partition("-")[0] == "convert" and run.convert.hosts == "all" and not alone
    if stage in ("train", "reference") or spread:
        return Share(layout.nodes, layout.gpus_per_node, None if alone else engine)
    if stage == "reinforce":
        reinforce = run.reinforce
        elsewhere = reinforce.hosts or reinforcement.in_turn(run) or run.hardware.gpu == "cpu"
        # Only the first host has engines on further GPUs, but all hosts of a gang are requested with the same number.
        further = 0 if elsewhere else reinforce.engines * reinforce.engine_gpus
        several = reinforce.hosts or not alone
        return Share(layout.nodes + reinforce.hosts, layout.gpus_per_node + further, engine if several else None)
    if stage.partition("-")[0] == "evaluate":
        nodes = evaluate.nodes or 1
        if nodes == 1 and evaluate.engine is None and not (leaves and may_leave(run)):
            return Share(1, evaluate.gpus)
        return Share(nodes, evaluate.gpus or layout.gpus_per_node, evaluate.engine or engine)
    return NONE


def may_leave(run: Run) -> bool:
    """Whether an evaluation of the flow's host may run on a host of training instead, if the flow's has no GPUs."""
    return (run.evaluate.nodes or 1) == 1 and run.evaluate.engine is None and run.gang.engine != HERE


def beside(run: Run, host: int) -> bool:
    """Whether the base is evaluated during training, on the flow's host with `host` GPUs.

    This is so on a host without GPUs. On hosts of a scheduler the base is evaluated before training. The
    scheduler might give the evaluation the hosts that training waits for, and a base that cannot be evaluated must be
    noticed before the long training.
    """
    training, evaluation = takes(run, "train"), takes(run, "evaluate-base")
    if not (training.here and evaluation.here):
        return False
    return not host or training.of(host) + evaluation.of(host) <= host
