"""Merge of trained weights into released ones, weight by weight: a low-rank adapter to add, or a new value.

low_rank.py computes the merged weight. A, B and magnitudes are read from the checkpoint when they are needed, because
all adapters of a model with many experts do not fit into memory together.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
import yaml

from conf.model_files.quantization import Packed
from contract.faults import Fault
from trainer.weights import mapping, torch_dist
from trainer.weights.coverage import VOCABULARY
from trainer.weights.low_rank import Change
from trainer.weights.released import Entry, Model, enumerate_names
from trainer.weights.released_tensors import DTYPES
from trainer.weights.torch_dist import Place, Stored

ADAPTER = re.compile(
    r"(?P<layer>.+)\.adapter\.(?P<role>linear_in|linear_out|weight_magnitude)(\.weight)?(?P<expert>\d*)$"
)


@dataclass(frozen=True)
class Adapter:
    """The adapter of one released weight."""

    a: Place
    b: Place
    magnitude: Place | None
    part: mapping.Part
    alpha: float

    @property
    def places(self) -> list[Place]:
        return [place for place in (self.a, self.b, self.magnitude) if place]

    def magnitudes(self, stored: Stored, config) -> torch.Tensor | None:
        if self.magnitude is None:
            return None
        whole = torch_dist.read(stored, self.magnitude)
        # Checkpoints up to November 2026 have the magnitudes of a fused gate and up in the order of tensor-parallel
        # ranks, gate before up on each; B, saved in twice as many pieces, is in the right order.
        ways = len(self.magnitude.chunks)
        if self.part.role in ("gate", "up") and ways > 1 and len(self.b.chunks) == 2 * ways:
            whole = whole.view(ways, 2, -1).transpose(0, 1).reshape(-1)
        return self.part.rows(whole, config)

    def merged(self, weight: torch.Tensor, change: Change) -> torch.Tensor:
        """Return the released weight merged with this adapter."""
        before = self.part.turn(weight)
        result, filled = torch.empty_like(before, memory_format=torch.contiguous_format), 0
        for block in change.blocks(before):
            result[filled : filled + len(block)] = block
            filled += len(block)
        return self.part.turn(result).contiguous()

    def change(self, stored: Stored, config) -> Change:
        a, b = torch_dist.read(stored, self.a), torch_dist.read(stored, self.b)
        return Change(a, self.part.rows(b, config), self.alpha / len(a), self.magnitudes(stored, config))


@dataclass(frozen=True)
class NewValue:
    """One released weight with a new value, from full fine-tuning or from the converted base."""

    place: Place
    part: mapping.Part
    trimmed: bool  # its rows are a vocabulary, whose padding is removed

    def blocks(self, stored: Stored, config, entry: Entry | Packed) -> list[torch.Tensor]:
        """Return the value, in blocks of its rows if nothing has to be assembled."""
        part = self.part
        if part.role is not None or part.turned or part.expert is not None or not entry.shape:
            return [self.value(stored, config, entry)]
        left, result = entry.shape[0], []
        for block in torch_dist.rows(stored, self.place):
            kept = block[:left] if self.trimmed else block
            left -= len(kept)
            result.append(kept.to(DTYPES[entry.dtype]).contiguous())
        return result

    def value(self, stored: Stored, config, entry: Entry | Packed) -> torch.Tensor:
        whole = torch_dist.read(stored, self.place)
        rows = self.part.rows(whole[: entry.shape[0]] if self.trimmed else whole, config)
        return self.part.turn(rows).to(DTYPES[entry.dtype]).contiguous()


def find_adapters(stored: Stored, registry, model: Model, experts: int) -> dict[str, tuple[Adapter, ...]]:
    """Return the adapters by released name. A tensor with all experts of a layer has several, in order.

    An adapter that the experts of a layer share is stored once and belongs to each of them. Every tensor of the
    adapters must belong to a released weight and fit it.
    """
    layers: dict[tuple[str, str], dict[str, Place]] = defaultdict(dict)
    unmatched = []
    for name, place in stored.weights.items():
        if match := ADAPTER.match(name):
            shared = ".experts." in match["layer"] and not match["expert"]
            for expert in map(str, range(experts)) if shared else [match["expert"]]:
                layers[match["layer"], expert][match["role"]] = place
        else:
            unmatched.append(name)
    alpha = _alpha(stored)
    adapters: dict[str, dict[int | None, Adapter]] = defaultdict(dict)
    for (layer, expert), places in layers.items():
        name = f"{layer}.weight{expert}"
        parts = mapping.parts(registry, name)
        if parts is None or not {"linear_in", "linear_out"} <= places.keys():
            unmatched += [f"{layer}.adapter.{role}{expert}" for role in places]
            continue
        rows = sum(part.shape(model.weights[part.name].shape)[0] for part in parts if part.name in model.weights)
        for part in parts:
            adapter = Adapter(places["linear_in"], places["linear_out"], places.get("weight_magnitude"), part, alpha)
            if not _fits(adapter, model, rows) or part.expert in adapters[part.name]:  # a weight has one adapter
                unmatched.append(f"{name} (for {part.name})")
            else:
                adapters[part.name][part.expert] = adapter
    whole, broken = _in_order(adapters, model)
    unmatched += [f"adapters of {name} for some but not all experts" for name in broken]
    if unmatched:
        names = enumerate_names(sorted(unmatched))
        raise Fault(f"{stored.folder}: {len(unmatched)} tensors belong to no adapter of {model.folder}: {names}")
    return whole


def find_values(stored: Stored, registry, model: Model, elsewhere: set[str]) -> dict[str, tuple[NewValue, ...]]:
    """Return new values of all weights except `elsewhere`, by released name. Nothing may be left over.

    A tensor with all experts of a layer has several, in order.
    """
    values: dict[str, dict[int | None, NewValue]] = defaultdict(dict)
    unmatched = []
    for name, place in stored.weights.items():
        parts = mapping.parts(registry, name)
        if parts is None or any(part.name not in model.weights for part in parts):
            unmatched.append(name)
            continue
        for part in parts:
            if part.expert in values[part.name]:
                unmatched.append(f"{name} (for {part.name}, repeated)")
            elif part.expert is not None and place.shape != part.shape(model.weights[part.name].shape):
                unmatched.append(f"{name} (for {part.name}, of another shape)")
            else:
                values[part.name][part.expert] = NewValue(place, part, name in VOCABULARY)
    whole, _ = _in_order(values, model)
    missing = [name for name in model.weights if name not in whole and name not in elsewhere]
    if unmatched or missing:
        raise Fault(
            f"{stored.folder}: not the weights of {model.folder}; {len(missing)} are missing: "
            f"{enumerate_names(missing) or 'none'}; {len(unmatched)} have no place: "
            f"{enumerate_names(unmatched) or 'none'}"
        )
    return whole


def _in_order[Kind](
    sources: dict[str, dict[int | None, Kind]], model: Model
) -> tuple[dict[str, tuple[Kind, ...]], list[str]]:
    """Return each weight's sources in the order of experts, and the names of weights that lack some experts."""
    whole, broken = {}, []
    for name, of_experts in sources.items():
        numbers = [None] if None in of_experts else [*range(model.weights[name].shape[0])]
        if of_experts.keys() == {*numbers}:
            whole[name] = tuple(of_experts[number] for number in numbers)
        else:
            broken.append(name)
    return whole, broken


def _alpha(stored: Stored) -> float:
    """Return the adapter's alpha from Megatron-Bridge's file, after comparing it with training's."""
    path = stored.folder / "run_config.yaml"
    written = yaml.safe_load(path.read_text())["peft"]["alpha"]
    used = stored.in_memory["alpha"] if stored.in_memory else written
    if written != used:
        raise Fault(f"{path}: peft.alpha is {written}; the adapter was trained with {used}")
    return used


def _fits(adapter: Adapter, model: Model, rows: int) -> bool:
    entry = model.weights.get(adapter.part.name)
    return (
        entry is not None
        and adapter.a.shape[1] == adapter.part.shape(entry.shape)[1]
        and adapter.b.shape == (rows, adapter.a.shape[0])
        and (adapter.magnitude is None or adapter.magnitude.shape == (rows,))
    )
