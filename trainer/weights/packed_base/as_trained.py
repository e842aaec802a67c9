"""Weights of a packed base with their values during training, for a merge onto them (export.merge_onto: packed).

Training recorded which matrices it kept packed, and the error of each relative to the base (quantised/report.py). Here
the same codes are read or computed again: one whole matrix at a time, by the names of the release. Their errors must
equal the recorded errors; otherwise the base belongs to another training.

The distance between the merged model and the trained model is summed, both for this merge and for a merge onto the
released weights.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron import precision
from trainer.weights import mapping, torch_dist
from trainer.weights.conversion import unwritten
from trainer.weights.packed_base import files, packing
from trainer.weights.packed_base.loading import Source
from trainer.weights.packed_base.part import Found, Part, unpacked
from trainer.weights.quantised import report
from trainer.weights.quantised.pack import Squares
from trainer.weights.released import Model, enumerate_names

NAME = "from-training.jsonl"  # in an export: a line for all matrices, then a line for each, the largest distance first
GATED = ("gate", "up")  # roles of stacked matrices, in order
BOUND, LEAST = 0.01, 2.0**-8  # tolerance of errors: the base may have another type than the release


@dataclass(frozen=True)
class Sums(Squares):
    """Sums of squares over a matrix, in fp32."""

    weight: float = 0.0
    base: float = 0.0  # of training's weight minus the released one
    trained: float = 0.0
    packed: float = 0.0  # of the merged weight minus the trained one
    released: float = 0.0  # of a merge onto the released weight, minus the trained one


@dataclass(frozen=True)
class AsTrained:
    """Weights that training kept packed, by the names of the release."""

    source: Source
    form: Format
    dtype: torch.dtype  # of the weights unpacked in training
    gated: bool
    config: Any  # Megatron's
    model: Model
    recorded: dict[str, float]  # errors recorded by training, by Megatron's names
    parts: dict[str, dict[int | None, tuple[str, mapping.Part]]]  # of each released weight, by expert
    sections: dict[str, list[str]]  # by Megatron's name: the stored tensors of a weight, in order
    sums: dict[str, dict[str, Sums]] = field(default_factory=dict)  # by released and by Megatron's names

    def has(self, name: str) -> bool:
        return name in self.parts

    def read(self, part: mapping.Part) -> torch.Tensor | None:
        """Return the weight's values during training, in the release's orientation; None if it was not packed."""
        if (entry := self.parts.get(part.name, {}).get(part.expert)) is None:
            return None
        numbers = [unpacked(found, block) for found, block in self._matrices(entry[0], part.role)]
        rows = numbers[0] if part.role in GATED else part.rows(torch.cat(numbers), self.config)
        return part.turn(rows.to(self.dtype))

    def codes(self, part: mapping.Part) -> Found:
        """Return the codes, scales and factor of a packed weight, in the release's rows and in the format's blocks."""
        name, _ = self.parts[part.name][part.expert]
        matrices = self._matrices(name, part.role)
        codes = torch.cat([found[0] for found, _ in matrices])
        scales = torch.cat([found[1].repeat_interleave(block[0], 0)[: len(found[0])] for found, block in matrices])
        if part.role not in GATED:
            rows = part.rows(torch.arange(len(codes)), self.config)
            codes, scales = codes.view(torch.uint8)[rows].view(codes.dtype), scales[rows]
        height = self.form.block[0]
        of_blocks = scales[::height]
        if height > 1 and not torch.equal(of_blocks.repeat_interleave(height, 0)[: len(scales)], scales):
            text = f"the rows of {part.name} share no scales in blocks of {height}"
            raise Fault(f"export.quantization: packed, but {text}; model.base=int4 has a scale for each row")
        return codes, of_blocks, matrices[0][0][2]

    def measure(self, part: mapping.Part, before: torch.Tensor, trained: torch.Tensor, merged: torch.Tensor) -> None:
        """Add the distance of a weight from the trained one. All are in the release's orientation; `trained` is in
        fp32.
        """
        name, _ = self.parts[part.name][part.expert]
        released, before = mapping.read(self.model, part).float(), before.float()
        onto_released = (released + (trained - before)).to(merged.dtype).float()
        values = (released, before - released, trained, merged.float() - trained, onto_released - trained)
        self.sums.setdefault(part.name, {})[name] = Sums(*(float(value.square().sum()) for value in values))

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        of_names = {name: self.sums[name] for name in names if name in self.sums}
        return {"sums": {name: {key: asdict(one) for key, one in each.items()} for name, each in of_names.items()}}

    def _matrices(self, name: str, role: str | None) -> list[tuple[Found, tuple[int, int]]]:
        """Return the matrices of a Megatron weight, or only that of gate or up, with their blocks."""
        count, found = 2 if self.gated and "linear_fc1" in name else 1, []
        numbers = [GATED.index(role)] if role in GATED else range(count)
        for stored, number in itertools.product(self.sections[name], numbers):
            part = Part.of_matrix(stored, self.source.shape(stored), number, count)
            block = (self.source.height(part), self.form.block[1])
            found.append((self.source.of_part(part, block), block))
        return found


def open_as_trained(run: Run, model: Model, registry: Any, config: Any) -> AsTrained:
    """Open the base of this run's training."""
    form, base = FORMATS[run.model.base], Path(run.paths.base)
    whole, rows = recorded(run)
    if whole.get("base") != run.model.base:
        text = f"was trained on {whole.get('base')}, and model.base is {run.model.base}"
        raise Fault(f"paths.output: {run.paths.output}: {text}; model.base={whole.get('base')}")
    if (checkpoints.read_mark(base) or {}).get("to") == "packed":
        source: Source = files.open_packed(base, form)
    else:
        stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
        source = packing.Packing(form, stored, packing.release(run, form, config), None, "cpu")
    packed = of_source(run, source, model, registry, config, [row["tensor"] for row in rows])
    if cut := [name for name, parts in packed.sections.items() if len(parts) > 1]:
        text = f"the base stores {enumerate_names(sorted(cut), 3)} in sections, whose errors cannot be compared"
        raise Fault(f"export.merge_onto: packed, but {text}; released")
    packed.recorded.update({row["tensor"]: row["error"] for row in rows})
    return packed


def of_source(run: Run, source: Source, model: Model, registry: Any, config: Any, names: Iterable[str]) -> AsTrained:
    """Return the packed weights of a base. `names` are Megatron's."""
    parts: dict[str, dict[int | None, tuple[str, mapping.Part]]] = defaultdict(dict)
    sections: dict[str, list[str]] = defaultdict(list)
    order = {section: number for number, section in enumerate(torch_dist.SECTIONS)}
    for name in sorted(names, key=lambda name: order.get(name.rpartition(".")[2], 0)):
        before, _, section = name.rpartition(".")
        sections[whole := before if section in order else name].append(name)
        for part in mapping.parts(registry, whole) or ():
            parts[part.name][part.expert] = whole, part
    dtype, gated = precision.dtype(run.train.precision), bool(config.gated_linear_unit)
    return AsTrained(source, source.form, dtype, gated, config, model, {}, dict(parts), sections)


def recorded(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the rows that training wrote about its packed base: the summary, and those of each matrix."""
    path = Path(run.paths.output) / report.NAME
    try:
        whole, *rows = report.read_lines(path)
    except (OSError, ValueError) as error:
        text = f"{path}: {getattr(error, 'strerror', None) or 'damaged'}; training on a packed base writes it"
        raise Fault(f"export.merge_onto: packed, but {text}; released") from None
    return whole, rows


def lines(numbers: AsTrained, kind: str, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distances from training, of all and of each matrix. Raise a Fault for weights of another training."""
    sums: dict[str, Sums] = defaultdict(Sums)
    for entry in entries:
        for of_weight in entry["sums"].values():
            for name, one in of_weight.items():
                sums[name] += Sums(**one)
    _require_same(numbers, sums)
    rows = [{"tensor": name, **_errors(one)} for name, one in sums.items()]
    rows.sort(key=lambda line: (-line["released"], line["tensor"]))
    whole = {"onto": "packed", "base": kind, "matrices": len(rows), **_errors(sum(sums.values(), Sums()))}
    return [whole, *rows]


def lines_of_training(run: Run) -> list[dict[str, Any]]:
    """Return the distances of a merge onto the released weights, from training's report; empty without a report."""
    if not (Path(run.paths.output) / report.NAME).exists():
        return []
    of_all, rows = recorded(run)
    whole = {"onto": "released", "base": of_all["base"], "matrices": len(rows), "released": of_all["error"]}
    return [whole, *({"tensor": row["tensor"], "released": row["error"]} for row in rows)]


def summary(whole: dict[str, Any]) -> str:
    text = f"merged onto the {whole['onto']} weights, {100 * whole[whole['onto']]:.2g} % from those in training"
    other = f"; onto the released ones it would be {100 * whole['released']:.2g} %" if "packed" in whole else ""
    return f"{text}{other} ({whole['base']}, {whole['matrices']} matrices; {NAME} has each)"


def _errors(sums: Sums) -> dict[str, float]:
    squares = {"packed": sums.packed, "released": sums.released}
    return {name: (square / sums.trained) ** 0.5 if sums.trained else 0.0 for name, square in squares.items()}


def _require_same(numbers: AsTrained, sums: dict[str, Sums]) -> None:
    """Check that every matrix has the same distance from the release as in training, and that none was left out."""
    errors = {name: (one.base / one.weight) ** 0.5 if one.weight else 0.0 for name, one in sums.items()}
    expected = numbers.recorded
    changed = [
        f"{name} ({errors[name]:.4%} from the release, and in training {expected[name]:.4%})"
        for name in errors
        if abs(errors[name] - expected[name]) > BOUND * expected[name] + LEAST
    ]
    changed += [f"{name} (not in any exported weight)" for name in expected.keys() - errors.keys()]
    if changed:
        text = f"{len(changed)} packed matrices are not those that training had: {enumerate_names(sorted(changed))}"
        raise Fault(f"export.merge_onto: packed, but {text}; paths.base must be the base of that training")
