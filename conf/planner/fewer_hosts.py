"""Answers of the planner that a gang needs: a run on fewer hosts, and keys that need less memory.

    fits = fewer_hosts(run)         fits(nodes) -> Run | None, for a run that has lost hosts
    less_memory(run) -> str         keys to try after a training ran out of memory

Everything about fewer hosts is computed in advance, so a failed attempt only looks it up.
"""

from collections.abc import Callable

from conf.model_facts import ModelFacts
from conf.planner.hardware import GB, Gpu, of
from conf.planner.memory import memory
from conf.planner.search import changes, search
from conf.planner.verdict import facts_of, plan
from conf.rules.layout import problems
from conf.schema.run import Run
from contract.faults import ConfigError

SLOWER = 1.25  # layouts up to this many times slower than the fastest count, if they change fewer keys
ROOM = 0.9  # of the memory that was not enough; the rest covers the error of a plan


def fewer_hosts(run: Run, trains: Callable[[Run], Run] = lambda run: run) -> Callable[[int], Run | None]:
    """Return fits(nodes), which returns the same run on fewer hosts, or None if it must not or cannot train there.

    gang.min_nodes is the smallest number of hosts that train; without it the run never shrinks. `trains` returns the
    training part of a run in which some hosts do something else. Memory counts if hardware.gate is stop and the model
    is known.
    """
    if run.gang.min_nodes is None:
        return lambda nodes: None
    facts, gpu = _limits(run)
    smaller = {nodes: shrunk(run, nodes, facts, gpu, trains) for nodes in range(1, run.layout.nodes)}
    return smaller.get


def shrunk(
    run: Run,
    nodes: int,
    facts: ModelFacts | None = None,
    gpu: Gpu | None = None,
    trains: Callable[[Run], Run] = lambda run: run,
) -> Run | None:
    """Return the run on fewer hosts with smaller dp and edp; None if that is illegal or does not fit on `gpu`."""
    smaller = run.changed(layout={"nodes": nodes})
    training = trains(smaller)
    if training.layout.nodes < (run.gang.min_nodes or 1) or problems(training, facts):
        return None
    if gpu and facts and any(stage.over > 0 for stage in memory(training, facts, gpu)):
        return None
    return smaller


def less_memory(run: Run) -> str:
    """Return few keys with which the plan needs a tenth less memory, and is about as fast as the fastest layout."""
    try:
        facts, gpu = facts_of(run), of(run)
        now = plan(run, facts, gpu)
        enough = ROOM * min(now.fullest.total if now.stages else gpu.memory, gpu.memory)
        fitting = [layout for layout in search(run, facts, gpu, run.layout.world).fitting if layout.memory <= enough]
    except ConfigError as error:
        return f"no advice: {error.args[0]}"
    if not fitting:
        return f"no layout of {run.layout.world} {gpu.name} needs less by the plan; use more GPUs, or train less"
    fast = [layout for layout in fitting if layout.seconds <= SLOWER * fitting[0].seconds]
    keys = {changes(run, layout.applied(run)): layout.memory for layout in fast}
    fewest = min(keys, key=lambda text: len(text.split()))
    return f"try {fewest}: {keys[fewest] / GB:.0f} GB instead of {enough / ROOM / GB:.0f} by the plan"


def _limits(run: Run) -> tuple[ModelFacts | None, Gpu | None]:
    """Return facts of the model and of the GPU; None if they are unknown, or if hardware.gate does not stop a run."""
    try:
        return facts_of(run), of(run) if run.hardware.gate == "stop" else None
    except ConfigError:
        return None, None
