"""Prove the packed files of a base (convert.to: packed) against its weights, which are those of the release."""

import json
from pathlib import Path

import torch

from conf.rules.packed_base import FORMATS
from trainer.megatron.packed_base.weight import Store
from trainer.proof.findings import Findings
from trainer.weights.packed_base import files
from trainer.weights.packed_base.files import Packed
from trainer.weights.packed_base.packing import Packing
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report
from trainer.weights.torch_dist import Stored


def prove(base: Path, name: str, stored: Stored, found: Findings) -> int:
    """Compare every tensor of the files with the base's. Returns the number of those that are packed."""
    form = FORMATS[name]
    there, anew = files.open_packed(base, form, checked=False), Packing(form, stored, None, None, "cpu")
    rows = map(json.loads, (base / report.NAME).read_text().splitlines()[1:])
    as_released = {row["tensor"] for row in rows if row["as_released"]}
    for odd in sorted(there.index.keys() ^ stored.places.keys()):
        text = "is in none of the packed files" if odd in stored.places else "is packed, and no weight of the model"
        found.add(f"{odd}: {text}")
    count = 0
    for tensor in sorted(there.index.keys() & stored.places.keys()):
        with found.of(tensor):
            count += "height" in there.index[tensor]
            if wrong := _wrong(there, anew, tensor, tensor in as_released):
                found.add(f"{tensor}: {wrong}")
    return count


def _wrong(there: Packed, anew: Packing, name: str, as_released: bool) -> str:
    """Why what the files hold of a tensor is wrong; "" where it is right."""
    shape, row = anew.shape(name), there.index[name]
    if there.shape(name) != shape:
        return f"is {list(there.shape(name))}, and should be {list(shape)}"
    start = (0,) * len(shape)
    if "height" not in row:
        same = _same(there.box(name, start, shape), anew.box(name, start, shape))
        return "" if same else "is not the released weight"
    matrices, width = row["matrices"], there.form.block[1]
    for number in range(matrices):
        each = shape[0] // matrices
        part = Part(each * number, name, (each * number, 0), (each, shape[1]), (number, matrices))
        codes, scales, factor = there.of_part(part, (row["height"], width))
        if as_released:
            factors = None if factor is None else factor.view(1, 1)
            block = (row["height"], width)
            (numbers,) = Store(codes.contiguous()[None], scales[None], block, torch.float32, factors).unpack()
            read = anew.box(name, part.offsets, part.sizes)
            if not _same(numbers.to(read.dtype), read):
                return "does not stand for the released numbers"
            continue
        pairs = zip((codes, scales, factor), anew.of_part(part, there.form.block), strict=True)
        if row["height"] != there.form.block[0] or not all(_same(one, other) for one, other in pairs):
            return "is not the released weight in these codes and scales"
    return ""


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    flat = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return alike and torch.equal(*flat)
