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
    next_token: bool = False  # its loss is that of the next token: z loss, batch ramp, MTP layers and perplexity
    one_shape: bool = False  # all batches have the same shape: CUDA graphs, overlap_tp and noise_scale need it
    reference: Literal["", "start", "teacher"] = ""  # the model that is asked about the rows before training
    problems: Callable[[Run], Problems] = lambda run: iter(())  # (key, problem) of values that do not go with it
