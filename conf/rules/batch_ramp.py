"""Batches that grow at the beginning of a training (train.ramp_from), by Megatron's own arithmetic.

sizes(train)                   from which sequence on a batch has which size
sequences(train, steps)        in so many steps from the first one
whole_batches(train, steps)    the same in batches of train.global_batch
"""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

from conf.schema.run import Run
from conf.schema.training import Train

KEYS = ("ramp_from", "ramp_by", "ramp_sequences")


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    train = run.train
    given = [key for key in KEYS if getattr(train, key) is not None]
    if train.batch_ramp is None:
        if given:
            lacks = "ramp_sequences" if "ramp_from" in given else "ramp_from"
            yield f"train.{given[0]}", f"{getattr(train, given[0])} has no effect without train.{lacks}"
        return
    first, added, ramp = train.batch_ramp
    if first >= train.global_batch:
        yield "train.ramp_from", f"{first}, and train.global_batch is {train.global_batch}: nothing grows"
    elif (train.global_batch - first) % added:
        whole = f"do not lead to train.global_batch {train.global_batch}"
        yield "train.ramp_from", f"{first} and steps of {added} (train.ramp_by) {whole}"
    elif ramp < (train.global_batch - first) // added:
        times = (train.global_batch - first) // added
        yield "train.ramp_sequences", f"{ramp}, within which batches grow {times} times"
    if run.layout.vpp:
        yield "train.ramp_from", "has no place for layout.vpp, whose microbatches go in groups of pp"
    if train.epochs is not None or "epoch" in (train.validate_every, run.checkpoint.save_every):
        yield "train.ramp_from", "makes steps of unlike sizes, of which an epoch has no whole number: name train.steps"


def sizes(train: Train) -> list[tuple[int, int]]:
    """Pairs of sequences that were trained on, and the size of the batches from there on."""
    if train.batch_ramp is None:
        return [(0, train.global_batch)]
    first, added, ramp = train.batch_ramp
    times = (train.global_batch - first) // added
    return [(ceil(ramp * number / times), first + number * added) for number in range(times + 1)]


def sequences(train: Train, steps: int) -> int:
    """Sequences of the first steps."""
    done, left = 0, steps
    bounds = sizes(train)
    for (_, size), (end, _) in pairwise(bounds):
        taken = min(left, max(0, ceil((end - done) / size)))
        done, left = done + taken * size, left - taken
    return done + left * train.global_batch


def whole_batches(train: Train, steps: int) -> float:
    return steps if train.batch_ramp is None else sequences(train, steps) / train.global_batch
