"""Forecast of a run: each stage's fingerprint, whether it is there, why not, and the likely cost of making it."""

from contract.amounts import clock, size
from tasks.run import artifact
from tasks.run.artifact import Artifact
from tasks.run.request import Request
from tasks.store import Store


def lines(request: Request, store: Store, processes: int) -> list[str]:
    """Lines of the forecast for the terminal. Costs are those of the most similar artifact that was made before."""
    width = max(map(len, request.stages))
    found, seconds = [], 0.0
    asked = {name: stage for name, stage in request.stages.items() if name not in request.unasked}
    for name, stage in asked.items():
        there = artifact.find(stage, store)
        if isinstance(there, Artifact) and name not in request.again:
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
    hours = seconds / 3600 * processes
    return [*found, f"known cost: {clock(seconds)} in sequence, {hours:.2f} process hours"]
