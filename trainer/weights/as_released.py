"""Writer of the merged model in the format of a quantised release: export.quantization=as_released.

Each file keeps its header, byte by byte. Codes and scales of a weight that was not trained are copied; those of a
trained one are its own again (pack.py), and what rounding lost is added up. Each is read back: a copied tensor must
have the released checksum, a rounded one the checksum of what was written, and each number of a merged weight must lie
no farther from what the adapter's factors give, multiplied once more, than the next code.
"""

# pyright: reportArgumentType=false

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from contract.faults import Fault
from trainer.weights import merge, merged_format, released, released_tensors
from trainer.weights.quantised import pack, unpack
from trainer.weights.quantised.pack import Loss
from trainer.weights.released import Entry, enumerate_names
from trainer.weights.trained import Trained

Parts = dict[str, torch.Tensor]  # codes and scales, by their names


@dataclass
class Rounding:
    """Trained weights in the release's format, one at a time, and what is lost on the way."""

    trained: Trained
    losses: dict[str, Loss] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    last: tuple[str, Parts] = ("", {})

    def parts(self, name: str) -> Parts:
        """Codes and scales of a trained weight."""
        if self.last[0] != name:
            packed, model = self.trained.model.packed[name], self.trained.model
            before = released_tensors.read(model, name).float()
            codes, scales = (released_tensors.at(model.folder, model.tensors[part]) for part in packed.tensors)
            new_codes, new_scales, loss = pack.change(name, packed, codes, scales, self.trained.exact(name) - before)
            self.losses[name], self.scales[name] = loss, new_scales
            self.last = name, {packed.codes: new_codes, packed.scales: new_scales}
        return self.last[1]

    def is_near(self, name: str, codes: torch.Tensor) -> bool:
        """Whether these codes are of the merged weight, computed once more in another order."""
        adapter, packed = self.trained.adapters[self.trained.copies.get(name, name)], self.trained.model.packed[name]
        factors = adapter.factors(self.trained.stored, self.trained.config)
        magnitude = adapter.magnitudes(self.trained.stored, self.trained.config)
        before, scales = released_tensors.read(self.trained.model, name), self.scales[name]
        expected = merge.expected(before, *factors, adapter.scale, magnitude)
        found = unpack.unpack(packed, codes, scales, torch.float32)
        smallest = unpack.spread(scales.float().view(unpack.grid(packed)), packed, 0, packed.shape[0]) * 2.0**-9
        bound = torch.maximum(expected.abs() / 8, smallest) * 1.001 + 1e-5 * expected.abs().max()
        # beside the rounding to the type that weights are unpacked to
        bound += torch.finfo(before.dtype).eps * expected.abs()
        return bool(((found - expected).abs() <= bound).all())


def write_file(rounding: Rounding, file: str, folder: Path) -> None:
    trained, target = rounding.trained, folder / file
    model, written = trained.model, {}
    weights = {part: name for name, one in model.packed.items() for part in one.tensors}
    entries = merged_format.in_order(model, file)
    with (model.folder / file).open("rb") as old, target.open("wb") as new:
        new.write(old.read(next(iter(entries.values())).start))
        for name, entry in entries.items():
            weight = weights.get(name, name)
            if not trained.has(weight):
                released.copy(old, new, entry)
                continue
            tensor = rounding.parts(weight)[name] if name in weights else trained.tensor(name)
            content = merged_format.as_bytes(tensor)
            written[name] = hashlib.sha256(content).hexdigest() if _is_finite(tensor) else "not finite"
            new.write(content)
    target.chmod(merged_format.READABLE)
    wrong = [name for name, entry in entries.items() if not _is_right(rounding, target, name, entry, written, weights)]
    edited = [name for name in wrong if not merged_format.is_released(trained, weights.get(name, name))]
    if edited:
        raise merged_format.changed(trained, edited)
    if wrong:
        raise Fault(f"{target}: read back, {len(wrong)} tensors are wrong: {enumerate_names(wrong)}")


def lost(parts: list[dict[str, Loss]]) -> dict:
    """Facts on what rounding has lost, of the weights that all ranks have rounded."""
    losses = {name: loss for part in parts for name, loss in part.items()}
    total = sum(losses.values(), Loss())
    worst = max(losses, key=lambda name: losses[name].relative, default="")
    found = {"weights": len(losses), "error": total.relative, "kept": total.share}
    return found | ({"worst": {"name": worst, "error": losses[worst].relative}} if worst else {})


def told(facts: dict) -> str:
    if not facts["weights"]:
        return "no quantised weight was trained, all are as released"
    worst = f"worst {facts['worst']['error']:.2%}, {facts['worst']['name']}"
    return (
        f"{facts['weights']} trained weights rounded to the release's format, by {facts['error']:.2%} of a weight "
        f"({worst}); they hold {facts['kept']:.1%} of what training has changed"
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.float().isfinite().all())


def _is_right(rounding: Rounding, target: Path, name: str, entry: Entry, written: dict[str, str], weights) -> bool:
    trained, weight = rounding.trained, weights.get(name, name)
    if name not in written:
        return released.checksum(target, entry) == trained.sums[name]
    if released.checksum(target, entry) != written[name] or not merged_format.is_released(trained, weight):
        return False
    if trained.copies.get(weight, weight) not in trained.adapters:
        return True
    found = released_tensors.at(target.parent, entry)
    if name in weights:
        return name != trained.model.packed[weight].codes or rounding.is_near(weight, found)
    return merged_format.is_merged(trained, name, found)
