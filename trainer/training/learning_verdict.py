"""Verdict of the learning check: whether every trained tensor learns, of every kind, in every layer.

A tensor learns if a gradient other than zero has reached it and its values have changed. Both are needed: weight decay
changes a weight that no gradient reaches, and a weight that the optimizer was not given has a gradient.

Experts. One that got no token cannot learn; neither can one whose tokens bear on no loss, such as padding behind the
last answer. trainer/training/learning_check.py therefore notes which experts got a token at which the layer's output
has a gradient: each of those must learn. The others may, and are counted. A layer none of whose experts got such a
token is at fault, whatever its experts did.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from trainer.weights.released import enumerate_names

Key = tuple[str, int | None]  # Megatron's name of a tensor, and the expert where the tensor holds several
SHOWN = 3


@dataclass(frozen=True)
class Seen:
    gradient: bool  # other than zero, in any of the steps
    changed: bool  # the model's values
    exact: bool | None  # the same of the optimizer's exact copy; None where there is none, or it cannot be read
    rounded: bool  # the model's values are so coarse that a small step may not show in them

    @property
    def moved(self) -> bool:
        return self.changed or self.exact is True or (self.rounded and self.exact is None)


@dataclass(frozen=True)
class Verdict:
    faults: list[str]
    learned: Counter  # tensors by kind
    layers: dict[str, int]  # of routed experts, by kind
    idle: int  # experts' tensors that had nothing to learn from

    @property
    def count(self) -> int:
        return self.learned.total()

    def __str__(self) -> str:
        parts = [
            f"{count} of {kind}" + (f" in {self.layers[kind]} layers" if kind in self.layers else "")
            for kind, count in sorted(self.learned.items())
        ]
        idle = f", {self.idle} more of experts that got no token with a loss" if self.idle else ""
        return f"{', '.join(parts)}{idle}"


def combined(everyone: list[dict[Key, Seen]]) -> dict[Key, Seen]:
    """Observations of all ranks: a gradient on any of them, a change on each that holds the tensor or a part of it."""
    found: dict[Key, Seen] = {}
    for of_rank in everyone:
        for key, one in of_rank.items():
            other = found.get(key, one)
            exact = [seen.exact for seen in (one, other) if seen.exact is not None]
            found[key] = Seen(
                one.gradient or other.gradient,
                one.changed and other.changed,
                any(exact) if exact else None,
                one.rounded,
            )
    return found


def judge(found: dict[Key, Seen], needed: dict[str, set[int]], every_layer: bool = True) -> Verdict:
    """Judge whether every tensor learns.

    `needed` has, by layer, the experts that got a token that bears on the loss. With `every_layer`, each layer must
    have one.
    """
    learned, total, idle = Counter(), Counter(), 0
    without: dict[tuple[str, str], list[str]] = defaultdict(list)
    layers: dict[str, set[str]] = defaultdict(set)
    for (name, expert), seen in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        kind, layer = kind_of(name), name.partition(".experts.")[0]
        if expert is not None:
            layers[kind].add(layer)
            if expert not in needed.get(layer, set()):
                idle += 1
                continue
        total[kind] += 1
        if seen.gradient and seen.moved:
            learned[kind] += 1
        else:
            which = name if expert is None else f"{name}[{expert}]"
            what = [text for text, lacks in LACKS.items() if lacks(seen)]
            without[" and ".join(what), kind].append(which)
    faults = [
        f"{len(names)} of {total[kind]} tensors of {kind} {what} ({enumerate_names(names, SHOWN)})"
        for (what, kind), names in without.items()
    ]
    for kind, names in layers.items():
        if every_layer and (lost := sorted(layer for layer in names if not needed.get(layer))):
            faults.append(
                f"no expert got a token with a loss in {len(lost)} layers of {kind} ({enumerate_names(lost)})"
            )
    return Verdict(faults, learned, {kind: len(names) for kind, names in layers.items()}, idle)


def kind_of(name: str) -> str:
    within = "multi-token prediction: " if name.startswith("mtp.") else ""
    for part, kind in KINDS.items():
        if part in name:
            return within + kind
    return within + "other"


LACKS = {"got no gradient": lambda seen: not seen.gradient, "have not changed": lambda seen: not seen.moved}
KINDS = {
    "norm": "norms",
    ".shared_experts.": "shared experts",
    ".experts.": "routed experts",
    ".router.": "router",
    ".self_attention.": "attention",
    ".mlp.": "dense mlp",
    "embedding": "embedding",
    "output_layer": "output layer",
}
