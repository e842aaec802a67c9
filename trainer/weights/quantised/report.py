"""Report of a packed base: how far each matrix lies from the base, in a file and a line of the log.

    packed-base.jsonl    of the run, or of a base that was packed once: a line for all, and one for each matrix, the
                         worst first

Errors are relative: the root of squares summed over the matrix, of what codes say less what the base holds, over the
base's own. A matrix that several ranks hold a part of counts once, with all of its parts.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from contract.amounts import size
from contract.files import write_atomically
from trainer.startup.console import say

NAME = "packed-base.jsonl"


@dataclass(frozen=True)
class Row:
    """A part of a matrix: its place, and sums of squares over its numbers."""

    name: str  # Megatron's
    offsets: tuple[int, ...]
    numbers: int
    weight: float
    error: float
    as_released: bool  # codes and scales are those of the release


def row(name: str, offsets: tuple[int, ...], given: torch.Tensor, packed: torch.Tensor, as_released: bool) -> Row:
    """Compare the numbers of codes, in fp32, with those that they were made of."""
    given = given.float()
    weight, error = torch.stack((given.square().sum(), (packed - given).square().sum())).tolist()
    return Row(name, offsets, given.numel(), weight, error, as_released)


def row_of(noted: dict[str, Any]) -> Row:
    """A row as JSON has it."""
    return Row(**{**noted, "offsets": tuple(noted["offsets"])})


def write(folder: Path, base: str, mine: list[Row], packed_bytes: int) -> None:
    """Write the file and say the line, from rank 0, once all ranks have sent their rows."""
    if everyone := _gathered((mine, packed_bytes)):
        _write(folder, summary(base, [row for rows, _ in everyone for row in rows], [count for _, count in everyone]))


def store(folder: Path, base: str, rows: Iterable[Row], packed_bytes: int) -> None:
    """Write the file of a base that was packed once, and say the line. One rank alone does."""
    _write(folder, summary(base, rows, [packed_bytes]))


def repeat(base: Path, folder: Path, packed_bytes: int) -> None:
    """Write the file of a base that was packed once again, with the bytes of these ranks, and say the line."""
    if everyone := _gathered(packed_bytes):
        whole, *rows = map(json.loads, (base / NAME).read_text().splitlines())
        _write(folder, [whole | {"bytes_of_ranks": everyone}, *rows])


def _gathered(mine: Any) -> list[Any]:
    """What all ranks have, on rank 0; nothing on the others."""
    if not distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return [] if distributed.get_rank() else everyone


def _write(folder: Path, found: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NAME, "".join(json.dumps(line) + "\n" for line in found), durable=False)
    say(line(found))


def summary(base: str, rows: Iterable[Row], packed_bytes: list[int]) -> list[dict[str, Any]]:
    """Sums of all matrices, and those of each. Copies of a part on several ranks count once."""
    matrices: dict[str, list[Row]] = {}
    for one in {(row.name, row.offsets): row for row in rows}.values():
        matrices.setdefault(one.name, []).append(one)
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
