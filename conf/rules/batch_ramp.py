"""Batches that grow at the beginning of a training (train.ramp_from), with Megatron's arithmetic.

sizes(train)                   sizes of batches, each with the number of its first sequence
sequences(train, steps)        sequences of the first steps
whole_batches(train, steps)    the same as a number of batches of train.global_batch
"""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

from conf.schema.run import Run
from conf.schema.training import Train

KEYS = ("ramp_from", "ramp_by", "ramp_sequences")


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    train = run.train
    keys = [key for key in KEYS if getattr(train, key) is not None]
    if train.batch_ramp is None:
        if keys:
            missing = "ramp_sequences" if "ramp_from" in keys else "ramp_from"
            yield f"train.{keys[0]}", f"{getattr(train, keys[0])} has no effect without train.{missing}"
        return
    first, added, ramp = train.batch_ramp
    if first >= train.global_batch:
        yield "train.ramp_from", f"{first}, but train.global_batch is {train.global_batch}: it must be smaller"
    elif (train.global_batch - first) % added:
        target = f"do not reach train.global_batch {train.global_batch}"
        yield "train.ramp_from", f"{first} and steps of {added} (train.ramp_by) {target}"
    elif ramp < (train.global_batch - first) // added:
        times = (train.global_batch - first) // added
        yield "train.ramp_sequences", f"{ramp}, but batches grow {times} times: at least {times}"
    if run.layout.vpp:
        yield "train.ramp_from", "cannot be combined with layout.vpp, which needs microbatches in groups of pp"
    if train.epochs is not None or "epoch" in (train.validate_every, run.checkpoint.save_every):
        yield "train.ramp_from", "makes steps of different sizes, so an epoch is not a number of steps: set train.steps"


def sizes(train: Train) -> list[tuple[int, int]]:
    """Return pairs: a number of finished sequences, and the size of the following batches."""
    if train.batch_ramp is None:
        return [(0, train.global_batch)]
    first, added, ramp = train.batch_ramp
    times = (train.global_batch - first) // added
    return [(ceil(ramp * number / times), first + number * added) for number in range(times + 1)]


def sequences(train: Train, steps: int) -> int:
    """Return the number of sequences of the first steps."""
    done, left = 0, steps
    bounds = sizes(train)
    for (_, size), (end, _) in pairwise(bounds):
        taken = min(left, max(0, ceil((end - done) / size)))
        done, left = done + taken * size, left - taken
    return done + left * train.global_batch


def whole_batches(train: Train, steps: int) -> float:
    return steps if train.batch_ramp is None else sequences(train, steps) / train.global_batch
