"""Writer of the merged model in the format of a quantised release: export.quantization=as_released.

Each file keeps its header, byte by byte, and is written in parts (parts.py). Codes and scales of an untrained weight
are copied; a trained weight is quantised again (pack.py), and the rounding losses are summed. Each tensor is read back:
a copied tensor must have the released checksum, a rounded tensor the checksum of the written bytes. Each value of a
merged weight must be within one code of a second computation from the adapter's factors.
"""

# pyright: reportArgumentType=false

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainer.weights import low_rank, released, released_tensors
from trainer.weights.exported.parts import Merged
from trainer.weights.quantised import pack, unpack

Parts = dict[str, torch.Tensor]  # codes and scales, by name


@dataclass
class Rounding(Merged):
    """Trained weights in the release's format, one at a time, and the losses of rounding."""

    threads: int = 1  # `last` serves one thread
    losses: dict[str, pack.Loss] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    last: tuple[str, Parts] = ("", {})

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        weight = self.weight(name)
        if not self.trained.has(weight):
            return None
        return [self.tensors(weight)[name]] if self.has(weight) else self.trained.blocks(name)

    def has(self, weight: str) -> bool:
        """Whether the weight is trained, and written as codes."""
        return weight in self.trained.model.packed and self.trained.has(weight)

    def weight(self, name: str) -> str:
        return self.trained.model.weight_of.get(name, name)

    def is_right(self, path: Path, name: str, entry: released.Entry, written: str) -> bool:
        trained, weight = self.trained, self.weight(name)
        if not trained.has(weight):
            return released.has_sum(path, entry, trained.sums[name])
        source = trained.copies.get(weight, weight)
        if source in trained.adapters and weight not in trained.model.packed:
            return trained.is_merged_in(source, path, entry, written)
        if not released.has_sum(path, entry, written) or not trained.is_released(weight):
            return False
        if source not in trained.adapters or name != trained.model.packed[weight].codes:
            return True
        return self.is_near(weight, released_tensors.at(path.parent, replace(entry, file=path.name)))

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the rounding losses of these tensors' weights."""
        weights = {self.weight(name) for name in names}
        return {"losses": {name: asdict(self.losses[name]) for name in sorted(weights & self.losses.keys())}}

    def tensors(self, name: str) -> Parts:
        """Return codes and scales of a trained weight."""
        if self.last[0] != name:
            packed, model = self.trained.model.packed[name], self.trained.model
            before = released_tensors.read(model, name).float()
            codes, scales = (released_tensors.at(model.folder, model.tensors[part]) for part in packed.tensors)
            new_codes, new_scales, loss = pack.change(name, packed, codes, scales, self.trained.exact(name) - before)
            self.losses[name], self.scales[name] = loss, new_scales
            self.last = name, {packed.codes: new_codes, packed.scales: new_scales}
        return self.last[1]

    def is_near(self, name: str, codes: torch.Tensor) -> bool:
        """Whether these codes represent the merged weight, computed again in another order."""
        (adapter,) = self.trained.adapters[self.trained.copies.get(name, name)]  # FP8 has no stacks
        packed = self.trained.model.packed[name]
        change = self.trained.change(adapter)
        before, scales = released_tensors.read(self.trained.model, name), self.scales[name]
        exact = before.to(torch.float32, copy=True)
        expected = low_rank.expected(exact, change.a.float(), change.b.float() * change.scale, change.magnitude)
        unpacked = unpack.unpack(packed, codes, scales, torch.float32)
        smallest = unpack.spread(scales.float().view(unpack.grid(packed)), packed, 0, packed.shape[0]) * 2.0**-9
        bound = torch.maximum(expected.abs() / 8, smallest) * 1.001 + 1e-5 * expected.abs().max()
        # plus the rounding to the type of unpacked weights
        bound += torch.finfo(before.dtype).eps * torch.maximum(expected.abs(), before.float().abs())
        return bool(((unpacked - expected).abs() <= bound).all())


def lost(entries: list[dict[str, Any]], kept: bool = True) -> dict:
    """Return facts on the rounding losses of the weights in these parts, and on the share of the change kept."""
    losses = {name: pack.Loss(**loss) for entry in entries for name, loss in entry["losses"].items()}
    total = sum(losses.values(), pack.Loss())
    worst = max(losses, key=lambda name: losses[name].relative, default="")
    facts = {"weights": len(losses), "error": total.relative} | ({"kept": total.share} if kept else {})
    return facts | ({"worst": {"name": worst, "error": losses[worst].relative}} if worst else {})


def summary(facts: dict) -> str:
    if not facts["weights"]:
        return "no quantised weight was trained: all are as released"
    worst = f"worst {facts['worst']['error']:.2%}, {facts['worst']['name']}"
    text = f"by {facts['error']:.2%} of a weight ({worst})"
    if "kept" not in facts:
        return f"{facts['weights']} matrices rounded to {facts['to']}, {text}"
    text += f"; they keep {facts['kept']:.1%} of training's change"
    return f"{facts['weights']} trained weights rounded to the release's format, {text}"
