"""Micro batches of scored answers, padded or packed, for each data-parallel rank.

Megatron reads tensors of shape [rows, tokens]. A row has one sequence or, with packing, as many sequences as fit. The
loss reads tensors of shape [answers, tokens of the longest answer]: `places` has the position of each token's
prediction in the flattened rows. The loss of whole answers therefore does not depend on how the rows are built.

Packed micro batches have similar numbers of tokens. Every rank gets the same number of micro batches, as experts on
several ranks require.
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
    multiple: int  # to which a packed sequence's length is rounded up; 0 = not packed
    groups: int  # size of the groups in which interleaved pipeline stages take micro batches

    @classmethod
    def of(cls, run: Run) -> "Form":
        groups = run.layout.pp if run.layout.vpp else 1
        if run.data.packed:  # a micro batch is one row, as long as its packs
            return cls(1, run.train.micro_batch * run.data.seq_length, packing_multiple(run.layout), groups)
        return cls(run.train.micro_batch, run.data.seq_length, 0, groups)


def micro_batches(sequences: Sequence[Scored], form: Form, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Return the micro batches of a data-parallel rank. Each sequence is in a micro batch of exactly one rank."""
    if form.multiple:
        packs = balanced([_rounded(scored, form.multiple) for scored in sequences], form.length, ranks, form.groups)
        of_rank = packs[rank * len(packs) // ranks : (rank + 1) * len(packs) // ranks]
    else:
        share = range(len(sequences))[rank * len(sequences) // ranks : (rank + 1) * len(sequences) // ranks]
        of_rank = [list(share[start : start + form.rows]) for start in range(0, len(share), form.rows)]
    return [_batch(numbers, sequences, form) for numbers in of_rank]


def balanced(lengths: Sequence[int], capacity: int, ranks: int, groups: int) -> list[list[int]]:
    """Return the numbers of the sequences in each pack: few packs, equally many per rank, with similar token counts.

    The longest sequences are placed first, each into the pack with the fewest tokens.
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


def _rounded(scored: Scored, multiple: int) -> int:
    return -(-(len(scored.prompt) + len(scored.answer) - 1) // multiple) * multiple


def _batch(numbers: Sequence[int], sequences: Sequence[Scored], form: Form) -> dict[str, torch.Tensor]:
    lengths = [_rounded(sequences[number], form.multiple) if form.multiple else form.length for number in numbers]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    chosen = [sequences[number] for number in numbers]
    batch = _rows(chosen, starts, form) | _answers(chosen, starts)
    batch["numbers"] = torch.tensor(numbers, dtype=torch.long)
    if sequences and sequences[0].routes is not None:
        batch["routes"] = _routes(chosen, starts, form, routes.read(sequences[0].routes))
    return batch


def _routes(chosen: Sequence[Scored], starts: Sequence[int], form: Form, like: torch.Tensor) -> torch.Tensor:
    table = routes.unknown(form.rows * form.length, like)
    for scored, start in zip(chosen, starts, strict=True):
        assert scored.routes is not None, "all answers of a step have routes, or none"
        of_answer = routes.read(scored.routes)
        routes.require_known(of_answer, len(scored.prompt) + len(scored.answer) - 1)
        table[start : start + len(of_answer)] = of_answer
    return table.view(form.rows, form.length, *table.shape[1:])


def _rows(chosen: Sequence[Scored], starts: Sequence[int], form: Form) -> dict[str, torch.Tensor]:
    size = form.rows * form.length
    tokens, labels = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    positions, mask = torch.arange(form.length).repeat(form.rows), torch.zeros(size)
    bounds = [*(starts or [0]), size]
    for scored, start, end in zip(chosen, bounds[:-1], bounds[1:], strict=bool(chosen)):
        row = torch.tensor(scored.prompt + scored.answer)
        tokens[start : start + len(row) - 1], labels[start : start + len(row) - 1] = row[:-1], row[1:]
        mask[start + len(scored.prompt) - 1 : start + len(row) - 1] = torch.tensor(scored.sampled, dtype=mask.dtype)
        if form.multiple:
            positions[start:end] = torch.arange(end - start)
    named = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
    rows = {name: values.view(form.rows, form.length) for name, values in named.items()}
    if form.multiple:  # the rest of the row belongs to its last sequence, after all tokens that count
        cut = torch.tensor([bounds], dtype=torch.int32)
        rows |= {"cu_seqlens_q": cut, "cu_seqlens_kv": cut, "max_seqlen_q": cut.diff().max()}
    return rows


def _answers(chosen: Sequence[Scored], starts: Sequence[int]) -> dict[str, torch.Tensor]:
    shape = max(1, len(chosen)), max((len(scored.answer) for scored in chosen), default=1)
    places = torch.zeros(shape, dtype=torch.long)
    columns = {name: torch.zeros(shape) for name in ("mask", "engine", "advantages", "old", "reference")}
    for number, (scored, start) in enumerate(zip(chosen, starts, strict=True)):
        count = len(scored.answer)
        places[number, :count] = start + len(scored.prompt) - 1 + torch.arange(count)
        columns["mask"][number, :count] = torch.tensor(scored.sampled, dtype=torch.float)
        columns["advantages"][number, :count] = scored.advantage
        engine = [value or 0.0 for value in scored.engine]
        for name, values in (("engine", engine), ("old", scored.old), ("reference", scored.reference)):
            if values is not None:
                columns[name][number, :count] = torch.tensor(values)
    counts = [len(scored.answer) for scored in chosen]
    return {"places": places, "counts": torch.tensor(counts, dtype=torch.long)} | columns
