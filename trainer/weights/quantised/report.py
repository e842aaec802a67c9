"""Report of a packed base: the error of each matrix relative to the base, in a file and a line of the log.

    packed-base.jsonl    of the run, or of a base packed once: a line for all matrices, then one for each, the worst
                         first

The error of a matrix is relative: the norm of (values of the codes - values of the base), divided by the norm of the
base's values. A matrix that is distributed over several ranks counts once, with all its parts.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contract.amounts import size
from contract.files import write_atomically
from trainer.startup.console import say
from trainer.weights import atomic_folder

NAME = "packed-base.jsonl"


@dataclass(frozen=True)
class Row:
    """A part of a matrix: its place, and sums of squares over its values."""

    name: str  # Megatron's
    offsets: Sequence[int]
    numbers: int
    weight: float
    error: float
    as_released: bool  # whether codes and scales are the release's


def row(
    name: str, offsets: tuple[int, ...], compared: Iterable[tuple[torch.Tensor, torch.Tensor]], as_released: bool
) -> Row:
    """Compare original values with the values of codes, block by block, in fp32. Return the row of this part."""
    numbers, weight, error = 0, 0.0, 0.0
    for original, packed in compared:
        original = original.float()
        sums = torch.stack((original.square().sum(), (packed - original).square().sum())).tolist()
        numbers, weight, error = numbers + original.numel(), weight + sums[0], error + sums[1]
    return Row(name, offsets, numbers, weight, error, as_released)


def write(folder: Path, base: str, own: list[Row], packed_bytes: int) -> None:
    """Write the file and log the line, on rank 0, after all ranks have sent their rows."""
    of_ranks = atomic_folder.gather((own, packed_bytes))
    store(folder, summary(base, [row for rows, _ in of_ranks for row in rows], [count for _, count in of_ranks]))


def repeat(base: Path, folder: Path, packed_bytes: int) -> None:
    """Write the report of a base that was packed before, with the bytes of these ranks, and log the line."""
    whole, *rows = read_lines(base / NAME)
    store(folder, [whole | {"bytes_of_ranks": atomic_folder.gather(packed_bytes)}, *rows])


def store(folder: Path, found: list[dict[str, Any]]) -> None:
    """Write the file and log the line, on rank 0."""
    if atomic_folder.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / NAME, found)
        say(line(found))


def write_lines(path: Path, found: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in found), durable=False)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(base: str, rows: Iterable[Row], packed_bytes: list[int]) -> list[dict[str, Any]]:
    """Return sums over all matrices, and those of each. Copies of a part on several ranks count once."""
    matrices: dict[str, list[Row]] = {}
    for part_row in {(row.name, *row.offsets): row for row in rows}.values():
        matrices.setdefault(part_row.name, []).append(part_row)
    lines = [
        {
            "tensor": name,
            "numbers": sum(part.numbers for part in parts),
            "error": _relative(parts),
            "as_released": all(part.as_released for part in parts),
        }
        for name, parts in matrices.items()
    ]
    lines.sort(key=lambda line: (-line["error"], line["tensor"]))
    everything = [part for parts in matrices.values() for part in parts]
    whole = {
        "base": base,
        "matrices": len(lines),
        "numbers": sum(part.numbers for part in everything),
        "error": _relative(everything),
        "worst": lines[0]["tensor"] if lines else None,
        "as_released": sum(line["as_released"] for line in lines),
        "bytes_of_ranks": packed_bytes,
    }
    return [whole, *lines]


def line(found: list[dict[str, Any]]) -> str:
    whole, *rows = found
    text = f"model.base {whole['base']}: {whole['matrices']} matrices of {whole['numbers']:,} numbers in "
    text += f"{size(max(whole['bytes_of_ranks']))} on the fullest rank, {100 * whole['error']:.2f} % from the base"
    if rows and rows[0]["error"]:
        text += f" (most: {rows[0]['tensor']}, {100 * rows[0]['error']:.2f} %)"
    return text + f"; {whole['as_released']} as released; {NAME} has each"


def _relative(parts: list[Row]) -> float:
    weight = sum(part.weight for part in parts)
    return (sum(part.error for part in parts) / weight) ** 0.5 if weight else 0.0
