"""Prove the packed files of a base (convert.to: packed) against its weights, which equal the release's."""

from pathlib import Path

from conf.rules.packed_base import FORMATS
from trainer.proof.findings import Findings, same_bits
from trainer.weights.packed_base import files
from trainer.weights.packed_base.packing import Packing
from trainer.weights.packed_base.part import Part, unpacked
from trainer.weights.quantised import report
from trainer.weights.torch_dist import Stored


def prove(base: Path, name: str, stored: Stored, findings: Findings) -> int:
    """Compare every tensor of the files with the base's. Returns the number of packed tensors."""
    form = FORMATS[name]
    packed, again = files.open_packed(base, form, checked=False), Packing(form, stored, None, None, "cpu")
    as_released = {row["tensor"] for row in report.read_lines(base / report.NAME)[1:] if row["as_released"]}
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


def _wrong(packed: files.Packed, again: Packing, name: str, as_released: bool) -> str:
    """Return the reason why a tensor in the files is wrong; "" if it is correct."""
    shape, row = again.shape(name), packed.index[name]
    if packed.shape(name) != shape:
        return f"is {list(packed.shape(name))}, and should be {list(shape)}"
    start = (0,) * len(shape)
    if "height" not in row:
        same = same_bits(packed.box(name, start, shape), again.box(name, start, shape))
        return "" if same else "is not the released weight"
    block = (row["height"], packed.form.block[1])
    for number in range(row["matrices"]):
        part = Part.of_matrix(name, shape, number, row["matrices"])
        found = packed.of_part(part, block)
        if as_released:
            expected = again.box(name, part.offsets, part.sizes)
            if not same_bits(unpacked(found, block).to(expected.dtype), expected):
                return "does not give the released numbers"
        elif block != packed.form.block or not all(map(same_bits, found, again.of_part(part, block))):
            return "is not the released weight in these codes and scales"
    return ""
