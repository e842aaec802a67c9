"""Merge of trained weights into released ones, weight by weight: a low-rank adapter to be added, or a new value.

What an adapter makes of a weight is computed by low_rank.py. A, B and magnitudes are read from the checkpoint when they
are needed: those of a model with many experts do not fit in memory together.
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
        # Checkpoints up to November 2026 have the magnitudes of a fused gate and up as each tensor-parallel rank had
        # them, gate before up; B, saved in twice as many pieces, comes back whole.
        ways = len(self.magnitude.chunks)
        if self.part.role in ("gate", "up") and ways > 1 and len(self.b.chunks) == 2 * ways:
            whole = whole.view(ways, 2, -1).transpose(0, 1).reshape(-1)
        return self.part.rows(whole, config)

    def merged(self, weight: torch.Tensor, change: "Change") -> torch.Tensor:
        """The released weight with this adapter, as it has to be written."""
        before = self.part.turn(weight)
        found, filled = torch.empty_like(before, memory_format=torch.contiguous_format), 0
        for block in change.blocks(before):
            found[filled : filled + len(block)] = block
            filled += len(block)
        return self.part.turn(found).contiguous()

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
        """The merged weight in blocks of its rows, each of which is gone when the next is asked for."""
        return low_rank.merged(weight, self.a, self.b, self.scale, self.magnitude)

    def is_in(self, found: Matrix, weight: Matrix) -> bool:
        """Whether this is the merged weight."""
        return low_rank.is_merged(found, weight, self.a, self.b, self.scale, self.magnitude)


@dataclass(frozen=True)
class StackedAdapters:
    """Adapters of one released tensor that has all experts of a layer, in their order."""

    each: tuple[Adapter, ...]

    def merged(self, entry: Entry | Packed, merge: Callable[[Adapter], torch.Tensor]) -> torch.Tensor:
        """The released tensor with these adapters. Of the release, one expert at a time is read, and unpacked."""
        found = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for one in self.each:
            one.part.of(found).copy_(merge(one))
        return found


@dataclass(frozen=True)
class NewValue:
    """One released weight as a full fine-tuning, or the converted base, has it."""

    place: Place
    part: Part
    trimmed: bool  # its rows are a vocabulary, which may be padded

    def blocks(self, stored: Stored, config, entry: Entry | Packed) -> list[torch.Tensor]:
        """The value, one behind another in blocks of its rows where nothing has to be put together for it."""
        part = self.part
        if part.role is not None or part.turned or part.expert is not None or not entry.shape:
            return [self.value(stored, config, entry)]
        left, found = entry.shape[0], []
        for block in torch_dist.rows(stored, self.place):
            some = block[:left] if self.trimmed else block
            left -= len(some)
            found.append(some.to(DTYPES[entry.dtype]).contiguous())
        return found

    def value(self, stored: Stored, config, entry: Entry | Packed) -> torch.Tensor:
        whole = torch_dist.read(stored, self.place)
        found = self.part.rows(whole[: entry.shape[0]] if self.trimmed else whole, config)
        return self.part.turn(found).to(DTYPES[entry.dtype]).contiguous()

    @property
    def each(self) -> "tuple[NewValue, ...]":
        return (self,)


@dataclass(frozen=True)
class StackedValues:
    """Values of one released tensor that has all experts of a layer, in their order."""

    each: tuple[NewValue, ...]

    def blocks(self, stored: Stored, config, entry: Entry | Packed) -> list[torch.Tensor]:
        return [self.value(stored, config, entry)]

    def value(self, stored: Stored, config, entry: Entry | Packed) -> torch.Tensor:
        found = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for one in self.each:
            one.part.of(found).copy_(one.value(stored, config, entry))
        return found


def find_adapters(stored: Stored, registry, model: Model) -> dict[str, Adapter | StackedAdapters]:
    """Adapters by released name. Every tensor of every adapter must end up in one, and fit it."""
    layers: dict[tuple[str, str], dict[str, Place]] = defaultdict(dict)
    strange = []
    for name, place in stored.places.items():
        if match := ADAPTER.match(name):
            layers[match["layer"], match["expert"]][match["role"]] = place
        else:
            strange.append(name)
    alpha = _alpha(stored)
    adapters: dict[str, Adapter | StackedAdapters] = {}
    stacks: dict[str, dict[int, Adapter]] = defaultdict(dict)
    for (layer, expert), places in layers.items():
        name = f"{layer}.weight{expert}"
        found = mapping.parts(registry, name)
        if found is None or not {"linear_in", "linear_out"} <= places.keys():
            strange += [f"{layer}.adapter.{role}{expert}" for role in places]
            continue
        for part in found:
            adapter = Adapter(places["linear_in"], places["linear_out"], places.get("weight_magnitude"), part, alpha)
            is_first = part.name not in adapters and part.expert not in stacks[part.name]  # a weight has one adapter
            rows = sum(p.shape(model.weights[p.name].shape)[0] for p in found if p.name in model.weights)
            if not is_first or not _fits(adapter, model, rows):
                strange.append(f"{name} (for {part.name})")
            elif part.expert is None:
                adapters[part.name] = adapter
            else:
                stacks[part.name][part.expert] = adapter
    whole, broken = _whole(stacks, model)
    adapters |= {name: StackedAdapters(each) for name, each in whole.items()}
    strange += [f"those for {name}, of some experts and not of all" for name in broken]
    if strange:
        raise Fault(
            f"{stored.folder}: {len(strange)} tensors belong to no adapter of {model.folder}: "
            f"{enumerate_names(sorted(strange))}"
        )
    return adapters


def find_values(stored: Stored, registry, model: Model, elsewhere: set[str]) -> dict[str, NewValue | StackedValues]:
    """New values of all weights but those that come from `elsewhere`, by released name. Nothing may be left over."""
    values: dict[str, NewValue | StackedValues] = {}
    stacks: dict[str, dict[int, NewValue]] = defaultdict(dict)
    strange = []
    for name, place in stored.places.items():
        found = mapping.parts(registry, name)
        if found is None or any(part.name not in model.weights for part in found):
            strange.append(name)
            continue
        for part in found:
            value, of_experts = NewValue(place, part, name in VOCABULARY), stacks[part.name]
            if part.name in values or part.expert in of_experts:
                strange.append(f"{name} (for {part.name}, once more)")
            elif part.expert is None:
                values[part.name] = value
            elif place.shape == part.shape(model.weights[part.name].shape):
                of_experts[part.expert] = value
            else:
                strange.append(f"{name} (for {part.name}, of another shape)")
    whole, _ = _whole(stacks, model)
    values |= {name: StackedValues(each) for name, each in whole.items()}
    missing = [name for name in model.weights if name not in values and name not in elsewhere]
    if strange or missing:
        raise Fault(
            f"{stored.folder}: not the weights of {model.folder}; {len(missing)} are missing: "
            f"{enumerate_names(missing) or 'none'}; {len(strange)} have no place: {enumerate_names(strange) or 'none'}"
        )
    return values


def _whole[Kind](stacks: dict[str, dict[int, Kind]], model: Model) -> tuple[dict[str, tuple[Kind, ...]], list[str]]:
    """What stacks are made of, in the order of experts, and the names of those that lack one."""
    of_stack = {name: each for name, each in stacks.items() if each}
    wanted = {name: range(model.weights[name].shape[0]) for name in of_stack}
    broken = [name for name, each in of_stack.items() if each.keys() != {*wanted[name]}]
    return {name: tuple(of_stack[name][n] for n in wanted[name]) for name in of_stack if name not in broken}, broken


def _alpha(stored: Stored) -> float:
    """Alpha of the adapter, as Megatron-Bridge has written it down, which is as training had it in memory."""
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
