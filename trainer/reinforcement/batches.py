"""Micro batches of scored answers, padded or packed, for each data-parallel rank.

What Megatron reads is [rows, tokens]: a row is one sequence, or, packed, as many as fit. What the loss reads is
[answers, tokens of the longest]: `places` says where in the flattened rows each of these tokens is predicted. A loss
that needs whole answers is then the same however they are laid out.

Packed micro batches are balanced by tokens. Every rank gets equally many, so that experts on several ranks keep step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.rules.layout import packing_multiple
from conf.schema.run import Run
from trainer.reinforcement import routes
from trainer.reinforcement.samples import Scored

ROWS = ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q")


@dataclass(frozen=True)
class Form:
    """Layout of sequences in rows."""

    rows: int  # of a micro batch
    length: int  # of a row
    multiple: int  # that a packed sequence's length is rounded up to; 0 = not packed
    groups: int  # interleaved pipeline stages take micro batches in groups of so many

    @classmethod
    def of(cls, run: Run) -> "Form":
        groups = run.layout.pp if run.layout.vpp else 1
        multiple = packing_multiple(run.layout) if run.data.packed else 0
        return cls(run.train.micro_batch, run.data.seq_length, multiple, groups)


def micro_batches(sequences: Sequence[Scored], form: Form, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Micro batches of a data-parallel rank. Together those of all ranks have every sequence once."""
    if form.multiple:
        packs = balanced([_rounded(one, form.multiple) for one in sequences], form.length, ranks, form.groups)
        mine = packs[rank * len(packs) // ranks : (rank + 1) * len(packs) // ranks]
    else:
        share = range(len(sequences))[rank * len(sequences) // ranks : (rank + 1) * len(sequences) // ranks]
        mine = [list(share[start : start + form.rows]) for start in range(0, len(share), form.rows)]
    return [_batch(numbers, sequences, form) for numbers in mine]


def balanced(lengths: Sequence[int], capacity: int, ranks: int, groups: int) -> list[list[int]]:
    """Numbers of the sequences of each pack: few packs, equally many for each rank, much alike in tokens.

    The longest sequences go first, each to the pack that has the fewest tokens.
    """
    step = ranks * groups
    count = -(-sum(lengths) // capacity // step) * step or step
    while True:
        packs: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            least = min(range(count), key=filled.__getitem__)
            packs[least].append(number)
            filled[least] += lengths[number]
        if max(filled) <= capacity:
            return packs
        count += step


def _rounded(one: Scored, multiple: int) -> int:
    return -(-(len(one.prompt) + len(one.answer) - 1) // multiple) * multiple


def _batch(numbers: Sequence[int], sequences: Sequence[Scored], form: Form) -> dict[str, torch.Tensor]:
    lengths = [_rounded(sequences[number], form.multiple) if form.multiple else form.length for number in numbers]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    mine = [sequences[number] for number in numbers]
    found = _rows(mine, starts, form) | _answers(mine, starts) | {"numbers": torch.tensor(numbers, dtype=torch.long)}
    if sequences and sequences[0].routes is not None:
        found["routes"] = _routes(mine, starts, form, routes.read(sequences[0].routes))
    return found


def _routes(mine: Sequence[Scored], starts: Sequence[int], form: Form, like: torch.Tensor) -> torch.Tensor:
    found = routes.nobody_s(form.rows * form.length, like)
    for one, start in zip(mine, starts, strict=True):
        assert one.routes is not None, "all answers of a step have routes, or none"
        known = routes.read(one.routes)
        routes.require_told(known, len(one.prompt) + len(one.answer) - 1)
        found[start : start + len(known)] = known
    return found.view(form.rows, form.length, *found.shape[1:])


def _rows(mine: Sequence[Scored], starts: Sequence[int], form: Form) -> dict[str, torch.Tensor]:
    size = form.rows * form.length
    tokens, labels = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    positions, mask = torch.arange(form.length).repeat(form.rows), torch.zeros(size)
    bounds = [*(starts or [0]), size]
    for one, start, end in zip(mine, bounds[:-1], bounds[1:], strict=bool(mine)):
        row = torch.tensor(one.prompt + one.answer)
        tokens[start : start + len(row) - 1], labels[start : start + len(row) - 1] = row[:-1], row[1:]
        mask[start + len(one.prompt) - 1 : start + len(row) - 1] = torch.tensor(one.sampled, dtype=mask.dtype)
        if form.multiple:
            positions[start:end] = torch.arange(end - start)
    named = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
    found = {name: values.view(form.rows, form.length) for name, values in named.items()}
    if form.multiple:  # what is left of the row belongs to its last sequence, behind all that counts
        cut = torch.tensor([bounds], dtype=torch.int32)
        found |= {"cu_seqlens_q": cut, "cu_seqlens_kv": cut, "max_seqlen_q": cut.diff().max()}
    return found


def _answers(mine: Sequence[Scored], starts: Sequence[int]) -> dict[str, torch.Tensor]:
    shape = max(1, len(mine)), max((len(one.answer) for one in mine), default=1)
    places = torch.zeros(shape, dtype=torch.long)
    found = {name: torch.zeros(shape) for name in ("mask", "engine", "advantages", "old", "reference")}
    for number, (one, start) in enumerate(zip(mine, starts, strict=True)):
        count = len(one.answer)
        places[number, :count] = start + len(one.prompt) - 1 + torch.arange(count)
        found["mask"][number, :count] = torch.tensor(one.sampled, dtype=torch.float)
        found["advantages"][number, :count] = one.advantage
        engine = [value or 0.0 for value in one.engine]
        for name, values in (("engine", engine), ("old", one.old), ("reference", one.reference)):
            if values is not None:
                found[name][number, :count] = torch.tensor(values)
    counts = [len(one.answer) for one in mine]
    return {"places": places, "counts": torch.tensor(counts, dtype=torch.long)} | found
