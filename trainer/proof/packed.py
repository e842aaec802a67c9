"""Prove the packed files of a base (convert.to: packed) against its weights, which equal the release's."""

import json
from pathlib import Path

import torch

from conf.rules.packed_base import FORMATS
from trainer.megatron.packed_base.weight import Store
from trainer.proof.findings import Findings, same_bits
from trainer.weights.packed_base import files
from trainer.weights.packed_base.files import Packed
from trainer.weights.packed_base.packing import Packing
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report
from trainer.weights.torch_dist import Stored


def prove(base: Path, name: str, stored: Stored, findings: Findings) -> int:
    """Compare every tensor of the files with the base's. Returns the number of packed tensors."""
    form = FORMATS[name]
    packed, again = files.open_packed(base, form, checked=False), Packing(form, stored, None, None, "cpu")
    rows = map(json.loads, (base / report.NAME).read_text().splitlines()[1:])
    as_released = {row["tensor"] for row in rows if row["as_released"]}
    for odd in sorted(packed.index.keys() ^ stored.places.keys()):
        text = "is missing in the packed files" if odd in stored.places else "is packed, but not a weight of the model"
        findings.add(f"{odd}: {text}")
    count = 0
    for tensor in sorted(packed.index.keys() & stored.places.keys()):
        with findings.of(tensor):
            count += "height" in packed.index[tensor]
            if wrong := _wrong(packed, again, tensor, tensor in as_released):
                findings.add(f"{tensor}: {wrong}")
    return count


def _wrong(packed: Packed, again: Packing, name: str, as_released: bool) -> str:
    """The reason why a tensor in the files is wrong; "" if it is right."""
    shape, row = again.shape(name), packed.index[name]
    if packed.shape(name) != shape:
        return f"is {list(packed.shape(name))}, and should be {list(shape)}"
    start = (0,) * len(shape)
    if "height" not in row:
        same = _same(packed.box(name, start, shape), again.box(name, start, shape))
        return "" if same else "is not the released weight"
    matrices, width = row["matrices"], packed.form.block[1]
    for number in range(matrices):
        rows = shape[0] // matrices
        part = Part(rows * number, name, (rows * number, 0), (rows, shape[1]), (number, matrices))
        codes, scales, factor = packed.of_part(part, (row["height"], width))
        if as_released:
            factors = None if factor is None else factor.view(1, 1)
            block = (row["height"], width)
            (numbers,) = Store(codes.contiguous()[None], scales[None], block, torch.float32, factors).unpack()
            expected = again.box(name, part.offsets, part.sizes)
            if not _same(numbers.to(expected.dtype), expected):
                return "does not give the released numbers"
            continue
        pairs = zip((codes, scales, factor), again.of_part(part, packed.form.block), strict=True)
        if row["height"] != packed.form.block[0] or not all(_same(a, b) for a, b in pairs):
            return "is not the released weight in these codes and scales"
    return ""


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)
