"""Codes and scales of parts of a base, packed on request.

Blocks belong to whole matrices: if a part begins or ends within one, the rest of the block is read too, so codes do not
depend on how a matrix is cut. A release in the same format keeps its codes and scales (packed_base/released_scales.py).
The packing loss of each matrix is recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.model_files import config_json, quantization
from conf.rules.packed_base import Format
from conf.schema.run import Run
from trainer.megatron.model import open_bridge
from trainer.megatron.packed_base.codes import SCALES
from trainer.weights import released, torch_dist
from trainer.weights.packed_base import released_scales
from trainer.weights.packed_base.part import Found, Part, cut, unpacked
from trainer.weights.quantised import e2m1, pack, report

AT_ONCE = 2**18  # values that a CPU packs at a time: they fit into its cache


@dataclass(frozen=True)
class Packing:
    """Source of codes made from a base, with a list of packing losses."""

    form: Format
    stored: torch_dist.Stored
    release: released_scales.Release | None
    rows: list[report.Row] | None  # None: losses are not recorded
    device: str
    tops: dict[str, torch.Tensor] = field(default_factory=dict)  # largest value of all matrices of a stored tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return torch_dist.place_of(self.stored, name).shape

    def height(self, part: Part) -> int:
        """Return the block height of the part's matrix."""
        scales = self._released(part)
        return scales.height(part.matrix[1], self.form.block[0]) if scales else self.form.block[0]

    def box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Return a part of a tensor in the base."""
        return torch_dist.box(self.stored, name, offsets, sizes).to(self.device)

    def of_part(self, part: Part, block: tuple[int, int]) -> Found:
        """Return codes of a part, scales of its blocks (within those of the matrix), and the matrix's factor."""
        as_released = self._as_released(part, block)
        read, found = as_released or self._packed(part, block)
        if self.rows is not None:
            compared = _compared(read, found, block)
            self.rows.append(report.row(part.name, part.offsets, compared, as_released is not None))
        return found

    def _as_released(self, part: Part, block: tuple[int, int]) -> tuple[torch.Tensor, Found] | None:
        """Return the part and its released codes; None if the release has none, or they do not fit."""
        scales = self._released(part)
        factor = scales.factor(*part.matrix) if scales else None
        if not scales or (factor is None and self.form.factor_bytes):
            return None
        read = self.box(part.name, part.offsets, part.sizes)
        factor = None if factor is None else factor.to(read.device)
        released = scales.codes(self.form, read, (part.offsets[0], part.offsets[1]), block, factor)
        return (read, (*released, factor)) if released else None

    def _packed(self, part: Part, block: tuple[int, int]) -> tuple[torch.Tensor, Found]:
        """Return the part and its codes, from those of whole blocks."""
        form, (height, width) = self.form, self.shape(part.name)
        begin, whole = part.begin(height), (height // part.matrix[1], width)
        inside = (part.offsets[0] - begin, part.offsets[1])
        sizes = whole if form.factor_bytes else form.block  # the factor depends on the largest value of the matrix
        first = [offset // size * size for offset, size in zip(inside, sizes, strict=True)]
        last = [
            min(length, -(-(offset + count) // size) * size)
            for offset, count, size, length in zip(inside, part.sizes, sizes, whole, strict=True)
        ]
        lengths = (last[0] - first[0], last[1] - first[1])
        read = self.box(part.name, (begin + first[0], first[1]), lengths)
        codes, of_blocks, factor = of_matrix(form, read, self._top(part))
        (top, left), (rows, columns) = (o - start for o, start in zip(inside, first, strict=True)), part.sizes
        each = 8 // form.bits
        codes = codes[top : top + rows, left // each : (left + columns) // each]
        of_blocks = cut(of_blocks, (top, left), (rows, columns), block, form.block)
        return read[top : top + rows, left : left + columns], (codes, of_blocks, factor)

    def _top(self, part: Part) -> torch.Tensor | None:
        """Return the largest value of matrices that share a factor, as gate and up do in vLLM; None for others."""
        if not self.form.factor_bytes or part.matrix[1] == 1:
            return None
        if part.name not in self.tops:
            self.tops[part.name] = self.box(part.name, (0, 0), self.shape(part.name)).abs().amax().float()
        return self.tops[part.name]

    def _released(self, part: Part) -> released_scales.Scales | None:
        if self.release is None:
            return None
        return self.release.scales(*torch_dist.section_of(self.stored, part.name), self.shape(part.name)[0])


def release(run: Run, form: Format, config: Any) -> released_scales.Release | None:
    """Return the release if its config.json describes a quantisation that includes this format, else None."""
    folder = Path(run.paths.model)
    if not config_json.read(folder / config_json.NAME).get(quantization.KEY):
        return None
    registry = open_bridge(run)._model_bridge.mapping_registry()
    result = released_scales.Release(released.read(folder), form, registry, config)
    return result if result.names else None


def of_matrix(form: Format, read: torch.Tensor, top: torch.Tensor | None = None) -> Found:
    """Return codes and scales of whole blocks, and the factor of a matrix, or of several with this largest value."""
    blocks = read.split(_rows_at_once(read, form.block[0]))
    if form.factor_bytes and top is None:
        top = torch.stack([rows.float().abs().amax() for rows in blocks]).amax()
    codes, scales, factors = zip(*(_pack_rows(form, rows, top) for rows in blocks), strict=True)
    return torch.cat(codes), torch.cat(scales), factors[0]


def _rows_at_once(read: torch.Tensor, height: int) -> int:
    """Return the rows of whole blocks that a CPU's cache holds; on a GPU all rows."""
    return len(read) if read.is_cuda else max(1, AT_ONCE // (height * read.shape[1])) * height


def _pack_rows(form: Format, read: torch.Tensor, top: torch.Tensor | None) -> Found:
    """Return the codes of some rows of a matrix whose largest magnitude is `top`, if the format has a factor."""
    if form.factor_bytes:
        return e2m1.nvfp4(read, top)
    if form.kind == "mxfp4":
        return *e2m1.mxfp4(read), None
    scheme, kind = quantization.Scheme(form.kind, "", "", form.block, form.bits), SCALES[form.kind]
    codes, scales = pack.pack(quantization.Packed(scheme, (read.shape[0], read.shape[1]), "", ""), read, kind)
    return codes.view(torch.uint8) if form.kind == "int" else codes, scales.to(kind), None


def _compared(read: torch.Tensor, found: Found, block: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield values of a part and those of its codes, some rows at a time."""
    codes, scales, factor = found
    each = _rows_at_once(read, block[0])
    of_rows = codes.split(each), scales.split(-(-each // block[0]))
    for rows, some, of_some in zip(read.split(each), *of_rows, strict=True):
        yield rows, unpacked((some, of_some, factor), block)
