"""The stages of one run, with those that are not to be made, and those that are made again."""

from dataclasses import dataclass

from tasks.run.artifact import Stage


@dataclass(frozen=True)
class Request:
    """All that a run asks for."""

    stages: dict[str, Stage]  # by name, in order
    unasked: dict[str, str]  # why a stage is not to be made
    again: frozenset[str] = frozenset()  # made even where the artifact is there
