"""Outcomes of a run's stages, and the final state of the run."""

from dataclasses import dataclass
from typing import Any

from prefect import State
from prefect.states import Completed, Failed

from tasks.run.artifact import Artifact, Stage


@dataclass(frozen=True)
class Outcome:
    """Outcome of a stage."""

    state: str  # Cached, Completed, Failed (the user can fix it), Crashed (unknown cause), NotAsked
    seconds: float
    artifact: Artifact | None = None
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.state in ("Failed", "Crashed")


class Outcomes:
    """The stages of a run in order, and the outcomes so far by stage."""

    def __init__(self, stages: dict[str, Stage]):
        self.stages = stages
        self.by_stage: dict[str, Outcome] = {}
        self.pointless = ""  # reason why training must not start

    @property
    def made(self) -> dict[str, Artifact]:
        """Artifacts by the name of their stage."""
        return {name: outcome.artifact for name, outcome in self.by_stage.items() if outcome.artifact}

    def verdict(self, made: Any = None) -> State:
        """Return the final state of the flow, with `made` as its result if the flow is completed."""
        states = [outcome.state for outcome in self.by_stage.values()]
        ends = {name: outcome.reason for name, outcome in self.by_stage.items() if outcome.failed}
        if ends and self.pointless and "train" not in self.by_stage:
            ends["train"] = f"not started: {self.pointless}"
        if ends or len(states) < len(self.stages):
            message = "\n".join(f"{name}: {reason}" for name, reason in ends.items()) or "not all stages have run"
            return Failed(message=message, name="Crashed" if "Crashed" in states else "Failed")
        cached = states.count("Cached")
        return Completed(message=f"{cached} stages cached, {states.count('Completed')} made", data=made)
