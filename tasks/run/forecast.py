"""Forecast of a run: each stage's fingerprint, whether it is there, why not, and what making it would take.

A stage that was made before took what its record says. Else its time is the plan's, and where that knows none, as on a
CPU, that of the most similar artifact of the same model. Another model's says nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conf.planner.display import duration
from conf.planner.verdict import Plan
from contract.amounts import clock, size
from tasks.run import artifact
from tasks.run.artifact import Artifact, Stage
from tasks.run.steps import Request
from tasks.store import Store


@dataclass(frozen=True)
class Cost:
    text: str
    seconds: float | None = None  # None = nobody knows


def lines(request: Request, store: Store, planned: Plan) -> list[str]:
    """Lines of the forecast for the terminal."""
    width = max(map(len, request.stages))
    found, seconds, unknown = [], 0.0, []
    history = _History(store, request.stages["download"].fingerprint if "download" in request.stages else "")
    asked = {name: stage for name, stage in request.stages.items() if name not in request.unasked}
    for name, stage in asked.items():
        there = artifact.find(stage, store)
        if isinstance(there, Artifact) and name not in request.again:
            what = f"hit   {size(there.size)}, made in {clock(there.made['seconds'])} by {there.made['flow']}"
        else:
            known = there if isinstance(there, Artifact) else artifact.read(store, stage.key)
            reason = "made anew, as asked for" if isinstance(there, Artifact) else there.reason
            cost = _measured(known) if known else _planned(name, planned) or _alike(name, stage, history, planned)
            what = f"miss  {reason}; {cost.text}"
            seconds += cost.seconds or 0.0
            unknown += [name] if cost.seconds is None else []
        found.append(f"{name.ljust(width)}  {stage.fingerprint}  {what}")
    hours = seconds / 3600 * planned.run.world
    without = f", without {', '.join(unknown)}" if unknown else ""
    return [*found, f"known cost: {clock(seconds)} in sequence, {hours:.2f} process hours{without}"]


def _measured(known: Artifact) -> Cost:
    seconds = known.made["seconds"]
    return Cost(f"it took {clock(seconds)} and {size(known.size)} before", seconds)


def _planned(name: str, planned: Plan) -> Cost | None:
    need = next((need for need in planned.needs if need.stage == name and need.seconds is not None), None)
    if need is None or need.seconds is None:
        return None
    return Cost(f"{duration(need.seconds)}{f' and {size(need.disk)}' if need.disk else ''} by the plan", need.seconds)


def _alike(name: str, stage: Stage, history: "_History", planned: Plan) -> Cost:
    like = history.nearest(stage)
    if like is None:
        return Cost("nothing like it was made of this model yet")
    seconds, of = like.made["seconds"], ""
    if name == "train" and (wanted := planned.run.train.steps) and {"steps", "median_step_seconds"} <= {*like.result}:
        step, more = like.result["median_step_seconds"], wanted - like.result["steps"]
        seconds, of = max(step, seconds + more * step), f", at {step:.3g} s a step"
    return Cost(f"about {clock(seconds)}{of}, by the like of the same model", seconds)


class _History:
    """All that was made from one download."""

    def __init__(self, store: Store, model: str):
        self.store, self.model = store, model
        self.by_stage: dict[str, list[Artifact]] = {}

    def nearest(self, stage: Stage) -> Artifact | None:
        others = [one for one in self._every(stage.name) if one.key != stage.key and self._is_of_model(one.stage)]
        return artifact.most_similar(others, stage)

    def _every(self, name: str) -> list[Artifact]:
        if name not in self.by_stage:
            self.by_stage[name] = [*artifact.every(self.store, name)]
        return self.by_stage[name]

    def _is_of_model(self, stage: Stage) -> bool:
        return self.model in self._inputs(stage)

    def _inputs(self, stage: Stage) -> Iterator[str]:
        """Fingerprints of all that it was made from, and of what those were made from."""
        for fingerprint in stage.inputs.values():
            yield fingerprint
            for name in ("prepare", "convert", "reference", "train", "reinforce", "export", "evaluate"):
                yield from (
                    found
                    for one in self._every(name)
                    if one.stage.fingerprint == fingerprint
                    for found in self._inputs(one.stage)
                )
