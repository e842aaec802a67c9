"""Compare packed rows with the same rows alone, in one model with random weights. For test_packed_rows.py.

Prints, as JSON, the largest differences of a row's loss and of its logits, relative to the loss and to the largest
logit, and the numbers of rows whose logits change if the other rows of the pack have other tokens.
"""

import json
import os
from itertools import accumulate, chain

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import cross_entropy

from benchmarks import logits
from conf.schema.run import Run
from tests.support import drawn_models
from trainer.patches import packed_positions

LENGTHS = (40, 7, 64, 17)

Rows = list[list[int]]


def main(run: Run) -> None:
    # On some CPUs, MKL rounds a product by its number of rows, which differs for an expert with the other rows' tokens.
    os.environ["MKL_CBWR"] = "AVX2,STRICT"
    packed_positions.install()
    _, provider, model = logits.built(run)
    model[0].eval()
    rows, others = (drawn(provider.vocab_size, seed) for seed in (0, 1))
    with torch.no_grad():
        alone = [model[0](torch.tensor([row]), torch.arange(len(row))[None], None)[0] for row in rows]
        packed = in_a_pack(model[0], rows)
        changed = [number for number, row in enumerate(rows) if depends(model[0], number, row, others, packed[number])]
    report = {"loss": 0.0, "logits": 0.0, "changed": changed}
    for row, one, other in zip(rows, packed, alone, strict=True):
        report["loss"] = max(report["loss"], abs(loss(one, row) / loss(other, row) - 1))
        report["logits"] = max(report["logits"], float((one - other).abs().max() / other.abs().max()))
    print(json.dumps(report))
    torch.distributed.destroy_process_group()


def drawn(vocabulary: int, seed: int) -> Rows:
    rows = drawn_models.tokens(len(LENGTHS), max(LENGTHS), vocabulary, seed)
    return [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]


def in_a_pack(model, rows: Rows) -> list[torch.Tensor]:
    """Return the logits of each row of a pack."""
    lengths = [len(row) for row in rows]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits_of_pack = model(torch.tensor([[*chain(*rows)]]), positions, None, packed_seq_params=params)[0]
    return list(logits_of_pack.split(lengths))


def depends(model, number: int, row: list[int], others: Rows, expected: torch.Tensor) -> bool:
    """Whether any logit of the row differs from the expected ones if the other rows of its pack are `others`."""
    return not torch.equal(expected, in_a_pack(model, [*others[:number], row, *others[number + 1 :]])[number])


def loss(answer: torch.Tensor, row: list[int]) -> float:
    """Return the row's mean loss for the next token."""
    return float(cross_entropy(answer[:-1].double(), torch.tensor(row[1:])))
