"""Steps of the pipeline, as flows/pipeline.py declares them, and the stages that a run requests."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from prefect import Task

from conf.schema.run import Run
from contract.faults import Fault
from tasks.run.artifact import Stage


@dataclass(frozen=True)
class Step:
    """A stage of the pipeline. An input names its stage, or several stages: the first one that the run has is used."""

    name: str
    module: ModuleType  # its function `stage` returns the identity, its task of the module's name makes the artifact
    inputs: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # by parameter of both functions
    # More parameters of the task: artifacts that its inputs were made from.
    reads: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    may_fail: str = ""  # an input whose failure is passed to the task
    after: str = ""  # a stage that ends first, unless this host has GPUs for both
    gpus: bool = False  # waits for its turn at this host's GPUs
    exists: Callable[[Run], bool] = lambda run: True  # returns whether a run has this stage
    skip: Callable[[Run], str] = lambda run: ""  # returns the reason why the run skips this stage, or ""
    view: Callable[[Run], Run] = lambda run: run  # returns the run that this stage gets
    options: dict[str, str] = field(default_factory=dict)  # more arguments of `stage`

    @property
    def task(self) -> Task:
        """The task, renamed to the stage's name, which Prefect's pages show before the task starts."""
        return getattr(self.module, self.module.__name__.rpartition(".")[2]).with_options(name=self.name)


@dataclass(frozen=True)
class Request:
    """The stages of a run, and which of them are made."""

    stages: dict[str, Stage]  # by name, in order
    unasked: dict[str, str]  # reasons by name, for stages that are not made
    again: frozenset[str] = frozenset()  # names of stages that are made even if the artifact exists


class Pipeline:
    """All steps, in order."""

    def __init__(self, *steps: Step):
        self.steps = steps
        self.names = tuple(step.name for step in steps)

    def stages(self, run: Run) -> dict[str, Stage]:
        """Return all stages of a run by name, with their fingerprints. Look up sources on the Hub or in the store."""
        found: dict[str, Stage] = {}
        for step in self.steps:
            if step.exists(run):
                inputs = {name: found[maker] for name, maker in makers(step.inputs, found).items()}
                found[step.name] = step.module.stage(step.view(run), **inputs, **step.options)
        return found

    def unasked(self, run: Run, last: str | None) -> dict[str, str]:
        """Return the reasons, by name, why stages of the run are not made. `last` is the last stage to make."""
        later = self.names[self.names.index(last) + 1 :] if last else ()
        reasons = {
            step.name: step.skip(run) or (f"comes after {last}" if step.name in later else "")
            for step in self.steps
            if step.exists(run)
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def asked(self, run: Run, last: str | None) -> list[str]:
        """Return the names of the stages to make, in order. Sources are not read."""
        unasked = self.unasked(run, last)
        return [step.name for step in self.steps if step.exists(run) and step.name not in unasked]

    def request(self, run: Run, first: str | None = None, last: str | None = None) -> Request:
        """Return the request for the stages up to `last`. Stages from `first` on are made again."""
        self.require_order(first, last)
        again = self.names[self.names.index(first) :] if first else ()
        return Request(self.stages(run), self.unasked(run, last), frozenset(again))

    def require_order(self, first: str | None, last: str | None) -> None:
        if first and last and self.names.index(first) > self.names.index(last):
            raise Fault(f"from-stage {first} comes after until-stage {last}: nothing would be made again")


def makers(inputs: Mapping[str, str | tuple[str, ...]], names: Iterable[str]) -> dict[str, str]:
    """Return the stage that makes each input, by input. `names` are the run's stages; other inputs are left out."""
    known, found = {*names}, {}
    for name, made_by in inputs.items():
        candidates = (made_by,) if isinstance(made_by, str) else made_by
        if maker := next((stage for stage in candidates if stage in known), None):
            found[name] = maker
    return found
