"""Verdict of the learning check: whether every trained tensor of every kind and layer learns.

A tensor learns if a gradient other than zero has reached it and its values have changed. Both are needed: weight decay
changes a weight that no gradient reaches, and a weight that the optimizer was not given has a gradient.

An expert cannot learn without tokens, or if its tokens have no effect on the loss (for example padding after the last
answer). trainer/training/learning_check.py therefore records which experts got a token with a gradient at the layer's
output. Each of these experts must learn. The other experts may learn, and are only counted. If no expert of a layer got
a token with a gradient, the layer is reported as a fault.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from trainer.weights.released import enumerate_names

Key = tuple[str, int | None]  # Megatron's name of a tensor, and the expert if the tensor holds several
SHOWN = 3


@dataclass(frozen=True)
class Observation:
    gradient: bool  # the gradient was not zero in at least one of the steps
    changed: bool  # the model's values changed
    exact: bool | None  # the optimizer's exact copy changed; None if it does not exist or cannot be read
    rounded: bool  # the model's values are 16-bit: a small step may not show in them

    @property
    def moved(self) -> bool:
        return self.changed or self.exact is True or (self.rounded and self.exact is None)


@dataclass(frozen=True)
class Verdict:
    faults: list[str]
    learned: Counter  # tensors by kind
    layers: dict[str, int]  # of routed experts, by kind
    idle: int  # tensors of experts that got no token with a loss

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


def combined(of_all_ranks: list[dict[Key, Observation]]) -> dict[Key, Observation]:
    """Combine the ranks' observations: a gradient on any rank, a change on each that holds a part of the tensor."""
    combination: dict[Key, Observation] = {}
    for of_rank in of_all_ranks:
        for key, new in of_rank.items():
            old = combination.get(key, new)
            exact = [observed.exact for observed in (new, old) if observed.exact is not None]
            combination[key] = Observation(
                new.gradient or old.gradient, new.changed and old.changed, any(exact) if exact else None, new.rounded
            )
    return combination


def judge(observations: dict[Key, Observation], needed: dict[str, set[int]], every_layer: bool = True) -> Verdict:
    """Judge whether every tensor learns.

    `needed` has, by layer, the experts that got a token with an effect on the loss. With `every_layer`, each layer must
    have such an expert.
    """
    learned, total, idle = Counter(), Counter(), 0
    unlearned: dict[tuple[str, str], list[str]] = defaultdict(list)
    layers: dict[str, set[str]] = defaultdict(set)
    for (name, expert), observed in sorted(observations.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        kind, layer = kind_of(name), name.partition(".experts.")[0]
        if expert is not None:
            layers[kind].add(layer)
            if expert not in needed.get(layer, set()):
                idle += 1
                continue
        total[kind] += 1
        if observed.gradient and observed.moved:
            learned[kind] += 1
        else:
            tensor = name if expert is None else f"{name}[{expert}]"
            lacks = {"got no gradient": not observed.gradient, "have not changed": not observed.moved}
            reasons = [text for text, is_lacking in lacks.items() if is_lacking]
            unlearned[" and ".join(reasons), kind].append(tensor)
    faults = [
        f"{len(names)} of {total[kind]} tensors of {kind} {reason} ({enumerate_names(names, SHOWN)})"
        for (reason, kind), names in unlearned.items()
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
