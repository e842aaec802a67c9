"""Files of a base packed once (convert.to: packed), in the folder "packed" of the base.

    index.json          for each tensor its file and checksums; for a packed one also its block height and matrices
    00000.safetensors   tensors by Megatron's names; of a packed one NAME.codes, NAME.scales and, in nvfp4, NAME.factors

Codes are [rows, bytes of a row], for the whole model. Scales are [matrices, rows of blocks, blocks of a row]: gate and
up are two stacked matrices with separate blocks. A part is read without the rest, at any layout: of a cut over rows
only these rows, of a cut over columns also the rest of each disk page. The first reader of a tensor compares all of it
with its checksum; older bases have no checksums.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from conf.model_files import safetensors_header
from conf.rules.packed_base import Format
from contract import json_object
from contract.faults import Fault
from trainer.weights import released_tensors
from trainer.weights.packed_base.part import Found, Part, cut

FOLDER, INDEX = "packed", "index.json"
ENDS = CODES, SCALES, FACTORS = ".codes", ".scales", ".factors"
AGAIN = "remove the base and convert again, or take the artifact anew: python -m flows.artifacts verify"


@dataclass(frozen=True)
class Packed:
    """Source of the codes stored in files."""

    form: Format
    folder: Path
    index: dict[str, dict[str, Any]]
    headers: dict[str, dict[str, safetensors_header.Entry]] = field(default_factory=dict)  # of files opened so far
    sound: set[str] | None = field(default_factory=set)  # tensors with verified checksums; None: no verification

    def shape(self, name: str) -> tuple[int, ...]:
        if "height" not in self._row(name):
            return self._entry(name, name).shape
        rows, of_row = self._entry(name, name + CODES).shape
        return rows, of_row * 8 // self.form.bits

    def height(self, part: Part) -> int:
        """Return the block height of the part's matrix."""
        row = self._row(part.name)
        if row.get("matrices") != part.matrix[1]:
            text = f"{part.name} is {row.get('matrices', 0)} packed matrices, and the model has {part.matrix[1]}"
            raise Fault(f"{self.folder / INDEX}: {text}; {AGAIN}")
        return row["height"]

    def box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Return a part of a tensor that is not packed."""
        if not sizes:
            return self._read(name, name)
        rows = self._read(name, name, slice(offsets[0], offsets[0] + sizes[0]))
        result = rows[:, *(slice(first, first + size) for first, size in zip(offsets[1:], sizes[1:], strict=True))]
        if result.shape != sizes:
            raise Fault(f"{self.folder}: {name}: {result.numel()} of {torch.Size(sizes).numel()} elements are stored")
        return result

    def of_part(self, part: Part, block: tuple[int, int]) -> Found:
        """Return codes of a part, scales of its blocks (within those of the matrix), and the matrix's factor."""
        (top, left), (rows, columns), each = part.offsets, part.sizes, 8 // self.form.bits
        codes = self._read(part.name, part.name + CODES, slice(top, top + rows))
        codes = codes[:, left // each : (left + columns) // each]
        number, height = part.matrix[0], self.height(part)
        scales = self._read(part.name, part.name + SCALES)[number]
        inside = (top - part.begin(self.shape(part.name)[0]), left)
        scales = cut(scales, inside, (rows, columns), block, (height, self.form.block[1]))
        return codes, scales, self.factors(part.name)[number] if self.form.factor_bytes else None

    def factors(self, name: str) -> torch.Tensor:
        """Return the factors of a tensor's matrices."""
        return self._read(name, name + FACTORS)

    def _row(self, name: str) -> dict[str, Any]:
        if name not in self.index:
            raise Fault(f"{self.folder}: holds no {name}")
        return self.index[name]

    def _entry(self, name: str, tensor: str) -> safetensors_header.Entry:
        file = self._row(name)["file"]
        if file not in self.headers:
            try:
                self.headers[file] = safetensors_header.read(self.folder / file)
            except Fault as fault:
                raise Fault(f"{str(fault).removesuffix(f'; {safetensors_header.AGAIN}')}; {AGAIN}") from None
        found = self.headers[file].get(tensor)
        if found is None or found.dtype not in released_tensors.DTYPES | released_tensors.CODES:
            raise Fault(f"{self.folder / file}: holds no {tensor}; {AGAIN}")
        return found

    def _read(self, name: str, tensor: str, rows: slice = slice(None)) -> torch.Tensor:
        entry = self._entry(name, tensor)
        if self.sound is not None and tensor not in self.sound:
            row = self._row(name)
            expected = row.get("sums", {}).get(tensor.removeprefix(name))
            if expected not in (None, _checksum(released_tensors.at(self.folder, entry), row)):
                raise Fault(f"{self.folder / entry.file}: damaged: {tensor} is not as it was written; {AGAIN}")
            self.sound.add(tensor)
        return released_tensors.at(self.folder, entry, rows)


def with_sums(row: dict[str, Any], content: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    """Return a tensor's row of the index with the checksums of its parts, by the endings of the parts' names."""
    parts = [part for part in ("", *ENDS) if name + part in content]
    return {**row, "sums": {part: _checksum(content[name + part], row) for part in parts}}


def _checksum(tensor: torch.Tensor, row: dict[str, Any]) -> str:
    """Return a checksum of a tensor's bytes and of the facts that decide how the bytes are read."""
    described = [str(tensor.dtype), *tensor.shape, row.get("height"), row.get("matrices")]
    found = xxhash.xxh3_128(json.dumps(described).encode())
    found.update(released_tensors.as_bytes(tensor))
    return found.hexdigest()


def open_packed(base: Path, form: Format, checked: bool = True) -> Packed:
    """Open the files of a base packed in this format. `checked`: verify the checksums of tensors."""
    folder = base / FOLDER
    index = json_object.read(folder / INDEX)
    rows = [index, *index.values()]
    if not all(isinstance(row, dict) for row in rows) or not all(
        isinstance(row.get("file"), str) and isinstance(row.get("sums", {}), dict) for row in rows[1:]
    ):
        raise Fault(f"{folder / INDEX}: does not name a file for each tensor; {AGAIN}")
    return Packed(form, folder, index, sound=set() if checked else None)


def write_index(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    (folder / INDEX).write_text(json.dumps(rows))
