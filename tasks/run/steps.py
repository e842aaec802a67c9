"""Steps of the pipeline: what flows/pipeline.py declares of each stage, and which stages a run asks for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from prefect import Task

from conf.schema.run import Run
from contract.faults import Fault
from tasks.run.artifact import Stage


@dataclass(frozen=True)
class Step:
    """A stage of the pipeline. An input names the stage that makes it, or several: the first that the run has."""

    name: str
    module: ModuleType  # its function `stage` returns the identity, its task of the module's name makes the artifact
    inputs: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # of both, by parameter
    reads: Mapping[str, str] = field(default_factory=dict)  # more of the task: artifacts that its inputs were made from
    may_fail: str = ""  # an input whose failure the task sees
    after: str = ""  # a stage that ends first, unless this host has GPUs for both
    gpus: bool = False  # waits for its turn at this host's GPUs
    exists: Callable[[Run], bool] = lambda run: True  # whether a run has this stage
    skip: Callable[[Run], str] = lambda run: ""  # why a run that has it does not make it
    view: Callable[[Run], Run] = lambda run: run  # the run as this stage sees it
    options: dict[str, str] = field(default_factory=dict)  # more arguments of `stage`

    @property
    def task(self) -> Task:
        """The task under the stage's name, which Prefect's pages show before the task starts."""
        return getattr(self.module, self.module.__name__.rpartition(".")[2]).with_options(name=self.name)


@dataclass(frozen=True)
class Request:
    """The stages that a run asks for."""

    stages: dict[str, Stage]  # by name, in order
    unasked: dict[str, str]  # reasons for stages that are not made
    again: frozenset[str] = frozenset()  # stages that are made even if the artifact exists


class Pipeline:
    """All steps, in order."""

    def __init__(self, *steps: Step):
        self.steps = steps
        self.names = tuple(step.name for step in steps)

    def stages(self, run: Run) -> dict[str, Stage]:
        """All stages of a run by name, and so all fingerprints. Asks the Hub or the store for the sources' content."""
        found: dict[str, Stage] = {}
        for step in self.steps:
            if step.exists(run):
                inputs = {name: found[maker] for name, maker in makers(step.inputs, found).items()}
                found[step.name] = step.module.stage(step.view(run), **inputs, **step.options)
        return found

    def unasked(self, run: Run, last: str | None) -> dict[str, str]:
        """Reasons, by name, for stages of the run that are not made. `last` is the last stage to make."""
        later = self.names[self.names.index(last) + 1 :] if last else ()
        reasons = {
            step.name: step.skip(run) or (f"comes after {last}" if step.name in later else "")
            for step in self.steps
            if step.exists(run)
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def asked(self, run: Run, last: str | None) -> list[str]:
        """Names of the stages to make, in order. Does not look at the sources."""
        unasked = self.unasked(run, last)
        return [step.name for step in self.steps if step.exists(run) and step.name not in unasked]

    def request(self, run: Run, first: str | None = None, last: str | None = None) -> Request:
        """The stages up to `last`; those from `first` on are made again."""
        self.require_order(first, last)
        again = self.names[self.names.index(first) :] if first else ()
        return Request(self.stages(run), self.unasked(run, last), frozenset(again))

    def require_order(self, first: str | None, last: str | None) -> None:
        if first and last and self.names.index(first) > self.names.index(last):
            raise Fault(f"from-stage {first} comes after until-stage {last}: nothing would be made again")


def makers(inputs: Mapping[str, str | tuple[str, ...]], names: Iterable[str]) -> dict[str, str]:
    """The stage that makes each input, out of the stages of a run. Inputs that none of them makes are left out."""
    known, found = {*names}, {}
    for name, made_by in inputs.items():
        candidates = (made_by,) if isinstance(made_by, str) else made_by
        if maker := next((stage for stage in candidates if stage in known), None):
            found[name] = maker
    return found
