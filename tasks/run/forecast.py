"""Forecast of a run: each stage's fingerprint, whether it is there, why not, and the likely cost of making it."""

from conf.schema.run import Run
from contract.amounts import size
from tasks.run import artifact
from tasks.run.artifact import Artifact, Stage
from tasks.run.order import asked
from tasks.run.progress import clock
from tasks.store import Store


def lines(run: Run, stages: dict[str, Stage], store: Store, first: str | None, last: str | None) -> list[str]:
    """Lines of the forecast for the terminal. Costs are those of the most similar artifact that was made before."""
    order = list(stages)
    from_stage = order[order.index(first) :] if first else []
    width = max(map(len, order))
    found, seconds = [], 0.0
    for name in asked(run, last):
        stage = stages[name]
        there = artifact.find(stage, store)
        if isinstance(there, Artifact) and name not in from_stage:
            what = f"hit   {size(there.size)}, made in {clock(there.made['seconds'])} by {there.made['flow']}"
        else:
            known = there if isinstance(there, Artifact) else artifact.read(store, stage.key)
            like = known or artifact.nearest(stage, store)
            reason = "made anew, as asked for" if isinstance(there, Artifact) else there.reason
            cost = (
                f"the like took {clock(like.made['seconds'])} and {size(like.size)}"
                if like
                else "nothing like it was made yet"
            )
            what = f"miss  {reason}; {cost}"
            seconds += like.made["seconds"] if like else 0.0
        found.append(f"{name.ljust(width)}  {stage.fingerprint}  {what}")
    hours = seconds / 3600 * run.world
    return [*found, f"known cost: {clock(seconds)} in sequence, {hours:.2f} process hours"]
