"""Merge of trained weights into released ones, weight by weight: a low-rank adapter to add, or a new value.

low_rank.py computes the merged weight. A, B and magnitudes are read from the checkpoint when they are needed, because
those of a model with many experts do not fit in memory together.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import yaml

from conf.model_files.quantization import Packed
from contract.faults import Fault
from trainer.weights import low_rank, mapping, torch_dist
from trainer.weights.low_rank import Matrix
from trainer.weights.mapping import Part
from trainer.weights.released import Entry, Model, enumerate_names
from trainer.weights.released_tensors import DTYPES
from trainer.weights.torch_dist import Place, Stored

ADAPTER = re.compile(
    r"(?P<layer>.+)\.adapter\.(?P<role>linear_in|linear_out|weight_magnitude)(\.weight)?(?P<expert>\d*)$"
)
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one released weight."""

    a: Place
    b: Place
    magnitude: Place | None
    part: Part
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.a.shape[0]

    @property
    def each(self) -> "tuple[Adapter, ...]":
        return (self,)

    @property
    def places(self) -> list[Place]:
        return [place for place in (self.a, self.b, self.magnitude) if place]

    def factors(self, stored: Stored, config) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_dist.read(stored, self.a), self.part.rows(torch_dist.read(stored, self.b), config)

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

    def merged(self, weight: torch.Tensor, change: "Change") -> torch.Tensor:
        """Return the released weight merged with this adapter."""
        before = self.part.turn(weight)
        result, filled = torch.empty_like(before, memory_format=torch.contiguous_format), 0
        for block in change.blocks(before):
            result[filled : filled + len(block)] = block
            filled += len(block)
        return self.part.turn(result).contiguous()

    def change(self, stored: Stored, config) -> "Change":
        return Change(*self.factors(stored, config), self.scale, self.magnitudes(stored, config))


@dataclass(frozen=True)
class Change:
    """Change of a weight by its adapter, read from the checkpoint."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None

    def blocks(self, weight: Matrix) -> Iterator[torch.Tensor]:
        """Yield the merged weight in blocks of rows; each block is invalid after the next is requested."""
        return low_rank.merged(weight, self.a, self.b, self.scale, self.magnitude)

    def is_in(self, found: Matrix, weight: Matrix) -> bool:
        """Whether `found` is the merged weight."""
        return low_rank.is_merged(found, weight, self.a, self.b, self.scale, self.magnitude)


@dataclass(frozen=True)
class StackedAdapters:
    """Adapters of a released tensor with all experts of a layer, in order."""

    each: tuple[Adapter, ...]

    def merged(self, entry: Entry | Packed, merge: Callable[[Adapter], torch.Tensor]) -> torch.Tensor:
        """Return the released tensor with these adapters. One expert at a time is read and unpacked."""
        result = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for adapter in self.each:
            adapter.part.of(result).copy_(merge(adapter))
        return result


@dataclass(frozen=True)
class NewValue:
    """One released weight with a new value, from full fine-tuning or from the converted base."""

    place: Place
    part: Part
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

    @property
    def each(self) -> "tuple[NewValue, ...]":
        return (self,)


@dataclass(frozen=True)
class StackedValues:
    """Values of a released tensor with all experts of a layer, in order."""

    each: tuple[NewValue, ...]

    def blocks(self, stored: Stored, config, entry: Entry | Packed) -> list[torch.Tensor]:
        return [self.value(stored, config, entry)]

    def value(self, stored: Stored, config, entry: Entry | Packed) -> torch.Tensor:
        result = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for value in self.each:
            value.part.of(result).copy_(value.value(stored, config, entry))
        return result


def find_adapters(stored: Stored, registry, model: Model) -> dict[str, Adapter | StackedAdapters]:
    """Return the adapters by released name. Every tensor of every adapter must belong to one, and fit it."""
    layers: dict[tuple[str, str], dict[str, Place]] = defaultdict(dict)
    unmatched = []
    for name, place in stored.places.items():
        if match := ADAPTER.match(name):
            layers[match["layer"], match["expert"]][match["role"]] = place
        else:
            unmatched.append(name)
    alpha = _alpha(stored)
    adapters: dict[str, Adapter | StackedAdapters] = {}
    stacks: dict[str, dict[int, Adapter]] = defaultdict(dict)
    for (layer, expert), places in layers.items():
        name = f"{layer}.weight{expert}"
        parts = mapping.parts(registry, name)
        if parts is None or not {"linear_in", "linear_out"} <= places.keys():
            unmatched += [f"{layer}.adapter.{role}{expert}" for role in places]
            continue
        for part in parts:
            adapter = Adapter(places["linear_in"], places["linear_out"], places.get("weight_magnitude"), part, alpha)
            is_first = part.name not in adapters and part.expert not in stacks[part.name]  # a weight has one adapter
            rows = sum(p.shape(model.weights[p.name].shape)[0] for p in parts if p.name in model.weights)
            if not is_first or not _fits(adapter, model, rows):
                unmatched.append(f"{name} (for {part.name})")
            elif part.expert is None:
                adapters[part.name] = adapter
            else:
                stacks[part.name][part.expert] = adapter
    whole, broken = _whole(stacks, model)
    adapters |= {name: StackedAdapters(each) for name, each in whole.items()}
    unmatched += [f"those for {name}, of some but not all experts" for name in broken]
    if unmatched:
        raise Fault(
            f"{stored.folder}: {len(unmatched)} tensors belong to no adapter of {model.folder}: "
            f"{enumerate_names(sorted(unmatched))}"
        )
    return adapters


def find_values(stored: Stored, registry, model: Model, elsewhere: set[str]) -> dict[str, NewValue | StackedValues]:
    """Return new values of all weights except `elsewhere`, by released name. Nothing may be left over."""
    values: dict[str, NewValue | StackedValues] = {}
    stacks: dict[str, dict[int, NewValue]] = defaultdict(dict)
    unmatched = []
    for name, place in stored.places.items():
        parts = mapping.parts(registry, name)
        if parts is None or any(part.name not in model.weights for part in parts):
            unmatched.append(name)
            continue
        for part in parts:
            value, of_experts = NewValue(place, part, name in VOCABULARY), stacks[part.name]
            if part.name in values or part.expert in of_experts:
                unmatched.append(f"{name} (for {part.name}, repeated)")
            elif part.expert is None:
                values[part.name] = value
            elif place.shape == part.shape(model.weights[part.name].shape):
                of_experts[part.expert] = value
            else:
                unmatched.append(f"{name} (for {part.name}, of another shape)")
    whole, _ = _whole(stacks, model)
    values |= {name: StackedValues(each) for name, each in whole.items()}
    missing = [name for name in model.weights if name not in values and name not in elsewhere]
    if unmatched or missing:
        raise Fault(
            f"{stored.folder}: not the weights of {model.folder}; {len(missing)} are missing: "
            f"{enumerate_names(missing) or 'none'}; {len(unmatched)} have no place: "
            f"{enumerate_names(unmatched) or 'none'}"
        )
    return values


def _whole[Kind](stacks: dict[str, dict[int, Kind]], model: Model) -> tuple[dict[str, tuple[Kind, ...]], list[str]]:
    """Return the members of complete stacks, in the order of experts, and the names of incomplete stacks."""
    of_stack = {name: each for name, each in stacks.items() if each}
    numbers = {name: range(model.weights[name].shape[0]) for name in of_stack}
    broken = [name for name, each in of_stack.items() if each.keys() != {*numbers[name]}]
    return {name: tuple(of_stack[name][n] for n in numbers[name]) for name in of_stack if name not in broken}, broken


def _alpha(stored: Stored) -> float:
    """Return the adapter's alpha from Megatron-Bridge's file, after comparing it with training's."""
    written = yaml.safe_load((stored.folder / "run_config.yaml").read_text())["peft"]["alpha"]
    used = stored.in_memory["alpha"] if stored.in_memory else written
    if written != used:
        raise Fault(
            f"{stored.folder / 'run_config.yaml'}: peft.alpha is {written}; the adapter was trained with {used}"
        )
    return used


def _fits(adapter: Adapter, model: Model, rows: int) -> bool:
    entry = model.weights.get(adapter.part.name)
    return (
        entry is not None
        and adapter.a.shape[1] == adapter.part.shape(entry.shape)[1]
        and adapter.b.shape == (rows, adapter.a.shape[0])
        and (adapter.magnitude is None or adapter.magnitude.shape == (rows,))
    )
