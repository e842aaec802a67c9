"""Forecast of a run: each stage's fingerprint, whether it is cached, why not, and its estimated cost.

The estimate comes from the record of an earlier artifact, else from the plan, else (as on a CPU) from the most similar
artifact of the same model. Other models are not used.
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
    seconds: float | None = None  # None = unknown


def lines(request: Request, store: Store, planned: Plan) -> list[str]:
    """Lines of the forecast for the terminal."""
    width = max(map(len, request.stages))
    forecast, seconds, unknown = [], 0.0, []
    history = _History(store, request.stages["download"].fingerprint if "download" in request.stages else "")
    for name, stage in request.stages.items():
        if name in request.unasked:
            continue
        stored = artifact.find(stage, store)
        if isinstance(stored, Artifact) and name not in request.again:
            line = f"hit   {size(stored.size)}, made in {clock(stored.made['seconds'])} by {stored.made['flow']}"
        else:
            known = stored if isinstance(stored, Artifact) else artifact.read(store, stage.key)
            reason = "made again, as requested" if isinstance(stored, Artifact) else stored.reason
            cost = _measured(known) if known else _planned(name, planned) or _similar(name, stage, history, planned)
            line = f"miss  {reason}; {cost.text}"
            seconds += cost.seconds or 0.0
            unknown += [name] if cost.seconds is None else []
        forecast.append(f"{name.ljust(width)}  {stage.fingerprint}  {line}")
    hours = seconds / 3600 * planned.run.world
    without = f", without {', '.join(unknown)}" if unknown else ""
    return [*forecast, f"known cost: {clock(seconds)} in sequence, {hours:.2f} process hours{without}"]


def _measured(known: Artifact) -> Cost:
    seconds = known.made["seconds"]
    return Cost(f"it took {clock(seconds)} and {size(known.size)} before", seconds)


def _planned(name: str, planned: Plan) -> Cost | None:
    need = next((need for need in planned.needs if need.stage == name and need.seconds is not None), None)
    if need is None or need.seconds is None:
        return None
    return Cost(f"{duration(need.seconds)}{f' and {size(need.disk)}' if need.disk else ''} by the plan", need.seconds)


def _similar(name: str, stage: Stage, history: "_History", planned: Plan) -> Cost:
    similar = history.nearest(stage)
    if similar is None:
        return Cost("no similar artifact of this model exists yet")
    seconds, speed = similar.made["seconds"], ""
    if name == "train" and (steps := planned.run.train.steps) and {"steps", "median_step_seconds"} <= {*similar.result}:
        step, more = similar.result["median_step_seconds"], steps - similar.result["steps"]
        seconds, speed = max(step, seconds + more * step), f", at {step:.3g} s per step"
    return Cost(f"about {clock(seconds)}{speed}, by a similar artifact of the same model", seconds)


class _History:
    """All artifacts of one download."""

    def __init__(self, store: Store, model: str):
        self.store, self.model = store, model
        self.by_stage: dict[str, list[Artifact]] = {}

    def nearest(self, stage: Stage) -> Artifact | None:
        others = [other for other in self._every(stage.name) if other.key != stage.key]
        return artifact.most_similar([other for other in others if self.model in self._inputs(other.stage)], stage)

    def _every(self, name: str) -> list[Artifact]:
        if name not in self.by_stage:
            self.by_stage[name] = [*artifact.every(self.store, name)]
        return self.by_stage[name]

    def _inputs(self, stage: Stage) -> Iterator[str]:
        """Fingerprints of its inputs, and of their inputs."""
        for fingerprint in stage.inputs.values():
            yield fingerprint
            for name in ("prepare", "convert", "reference", "train", "reinforce", "export", "evaluate"):
                for other in self._every(name):
                    if other.stage.fingerprint == fingerprint:
                        yield from self._inputs(other.stage)
