"""Weights of a packed base as training had them, for a merge onto their numbers (export.merge_onto: packed).

Training has written down which matrices it kept packed, and how far each lay from the base (quantised/report.py). The
same codes are read, or made, once more here: of one matrix at a time, whole, and by the names of the release. What they
stand for has to lie as far from the release as training has found, or they are those of another training.

How far the merged model is from the trained one is added up, as it is and as it would be on the released weights.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.rules.packed_base import Format, format_of
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from contract.files import write_atomically
from trainer.megatron import precision
from trainer.megatron.packed_base.weight import Store
from trainer.weights import mapping
from trainer.weights.conversion import unwritten
from trainer.weights.packed_base import files, packing
from trainer.weights.packed_base.loading import Source
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report
from trainer.weights.released import Model, enumerate_names

NAME = "from-training.jsonl"  # of an export: a line for all, and one for each matrix, the farthest first
BOUND, LEAST = 0.01, 2.0**-8  # of an error: the base may hold the release in another type


@dataclass(frozen=True)
class Sums:
    """Sums of squares over a matrix, in fp32."""

    weight: float = 0.0
    base: float = 0.0  # of what training had, less the released weight
    trained: float = 0.0
    packed: float = 0.0  # of the merged weight, less the trained one
    released: float = 0.0  # of one that is merged onto the released weight, less the trained one

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(one + more for one, more in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class AsTrained:
    """Weights that training kept packed, by the names of the release."""

    source: Source
    form: Format
    dtype: torch.dtype  # that training unpacked them to
    gated: bool
    config: Any  # Megatron's
    model: Model
    recorded: dict[str, float]  # errors that training has found, by Megatron's names
    parts: dict[str, dict[int | None, tuple[str, mapping.Part]]]  # of each released weight, by expert
    sums: dict[str, dict[str, Sums]] = field(default_factory=dict)  # by released and by Megatron's names

    def has(self, name: str) -> bool:
        return name in self.parts

    def each(self, name: str) -> list[tuple[str, mapping.Part]]:
        """Megatron's matrices of a released weight, and what part of it each is."""
        return [*self.parts.get(name, {}).values()]

    def read(self, part: mapping.Part) -> torch.Tensor | None:
        """The weight as training had it, the release's way round; None where it was not packed."""
        if (found := self.parts.get(part.name, {}).get(part.expert)) is None:
            return None
        name, _ = found
        count = 2 if self.gated and "linear_fc1" in name else 1
        if part.role in ("gate", "up"):
            numbers = self._matrix(name, ("gate", "up").index(part.role), count)
        else:
            numbers = part.rows(torch.cat([self._matrix(name, i, count) for i in range(count)]), self.config)
        return part.turn(numbers.to(self.dtype))

    def measure(self, part: mapping.Part, before: torch.Tensor, trained: torch.Tensor, merged: torch.Tensor) -> None:
        """Add up how far a weight is from the trained one. All are the release's way round; `trained` is in fp32."""
        name, _ = self.parts[part.name][part.expert]
        released, change = mapping.read(self.model, part), trained - before.float()
        onto_released = (released.float() + change).to(merged.dtype).float()
        found = (
            released.float(),
            before.float() - released.float(),
            trained,
            merged.float() - trained,
            onto_released - trained,
        )
        self.sums.setdefault(part.name, {})[name] = Sums(*(float(one.square().sum()) for one in found))

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        of_names = {name: self.sums[name] for name in names if name in self.sums}
        return {"sums": {name: {key: asdict(one) for key, one in each.items()} for name, each in of_names.items()}}

    def _matrix(self, name: str, number: int, count: int) -> torch.Tensor:
        rows, columns = self.source.shape(name)
        first, each = rows // count * number, rows // count
        part = Part(first, name, (first, 0), (each, columns), (number, count))
        block = (self.source.height(part), self.form.block[1])
        codes, scales, factor = self.source.of_part(part, block)
        factors = None if factor is None else factor.view(1, 1)
        return Store(codes[None].contiguous(), scales[None], block, torch.float32, factors).unpack()[0]


def open_as_trained(run: Run, model: Model, registry: Any, config: Any) -> AsTrained:
    """Open the base that this run's training had."""
    form, base = format_of(run), Path(run.paths.base)
    assert form, "model.base says how"
    whole, rows = recorded(run)
    if whole.get("base") != run.model.base:
        text = f"was trained on {whole.get('base')}, and model.base is {run.model.base}"
        raise Fault(f"paths.output: {run.paths.output}: {text}; model.base={whole.get('base')}")
    if (checkpoints.read_mark(base) or {}).get("to") == "packed":
        source: Source = files.open_packed(base, form)
    else:
        stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
        source = packing.Packing(form, stored, packing.release(run, form, config), None, "cpu")
    parts: dict[str, dict[int | None, tuple[str, mapping.Part]]] = defaultdict(dict)
    for row in rows:
        for part in mapping.parts(registry, row["tensor"]) or ():
            parts[part.name][part.expert] = row["tensor"], part
    errors = {row["tensor"]: row["error"] for row in rows}
    dtype, gated = precision.dtype(run.train.precision), bool(config.gated_linear_unit)
    return AsTrained(source, form, dtype, gated, config, model, errors, dict(parts))


def recorded(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Lines that training wrote down of its packed base: that of all, and those of each matrix."""
    path = Path(run.paths.output) / report.NAME
    try:
        whole, *rows = map(json.loads, path.read_text().splitlines())
    except (OSError, ValueError) as error:
        text = f"{path}: {getattr(error, 'strerror', None) or 'damaged'}; training on a packed base writes it"
        raise Fault(f"export.merge_onto: packed, but {text}; released") from None
    return whole, rows


def lines(numbers: AsTrained, kind: str, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distances from training of all and of each matrix, merged onto either. Raises a Fault for other numbers."""
    sums: dict[str, Sums] = defaultdict(Sums)
    for entry in entries:
        for of_weight in entry["sums"].values():
            for name, one in of_weight.items():
                sums[name] += Sums(**one)
    _require_same(numbers, sums)
    found = [{"tensor": name, **_errors(one)} for name, one in sums.items()]
    found.sort(key=lambda line: (-line["released"], line["tensor"]))
    whole = {"onto": "packed", "base": kind, "matrices": len(found), **_errors(sum(sums.values(), Sums()))}
    return [whole, *found]


def lines_of_training(run: Run) -> list[dict[str, Any]]:
    """The same of a merge onto the released weights, by what training has said of its base; nothing if it said none."""
    if not (Path(run.paths.output) / report.NAME).exists():
        return []
    of_all, rows = recorded(run)
    whole = {"onto": "released", "base": of_all["base"], "matrices": len(rows), "released": of_all["error"]}
    return [whole, *({"tensor": row["tensor"], "released": row["error"]} for row in rows)]


def write(folder: Path, found: list[dict[str, Any]]) -> None:
    write_atomically(folder / NAME, "".join(json.dumps(line) + "\n" for line in found), durable=False)


def told(whole: dict[str, Any]) -> str:
    text = f"merged onto the {whole['onto']} weights, {100 * whole[whole['onto']]:.2g} % from those in training"
    other = f"; onto the released ones it would be {100 * whole['released']:.2g} %" if "packed" in whole else ""
    return f"{text}{other} ({whole['base']}, {whole['matrices']} matrices; {NAME} has each)"


def _errors(sums: Sums) -> dict[str, float]:
    found = {"packed": sums.packed, "released": sums.released}
    return {name: (one / sums.trained) ** 0.5 if sums.trained else 0.0 for name, one in found.items()}


def _require_same(numbers: AsTrained, sums: dict[str, Sums]) -> None:
    """Check that every matrix lies as far from the release as in training, and that none was left out."""
    errors = {name: (one.base / one.weight) ** 0.5 if one.weight else 0.0 for name, one in sums.items()}
    expected = numbers.recorded
    other = [
        f"{name} ({errors[name]:.4%} from the release, and in training {expected[name]:.4%})"
        for name in errors
        if abs(errors[name] - expected[name]) > BOUND * expected[name] + LEAST
    ]
    other += [f"{name} (in no exported weight)" for name in expected.keys() - errors.keys()]
    if other:
        text = f"{len(other)} packed matrices are not those that training had: {enumerate_names(sorted(other))}"
        raise Fault(f"export.merge_onto: packed, but {text}; paths.base has to be the base of that training")
