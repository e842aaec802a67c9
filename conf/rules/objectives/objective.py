"""An objective of training, without torch: its inputs, needs, metrics and refusals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from conf.schema.run import Run

Problems = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Objective:
    kinds: tuple[str, ...]  # of prepared data that it reads: sft, text or preference
    reads: str  # the same, for people
    forward: str  # import path of the module with its loss: step(run) returns a forward_step
    keys: tuple[str, ...] = ()  # of section train that only this objective reads
    figures: tuple[str, ...] = ()  # logged next to its loss, means over rows; dpo has the names of TRL
    sequences: int = 1  # of a row in a forward pass
    reference: Literal["", "start", "teacher"] = ""  # the model that is asked about the rows before training
    problems: Callable[[Run], Problems] = lambda run: iter(())  # (key, problem) of values that do not go with it
