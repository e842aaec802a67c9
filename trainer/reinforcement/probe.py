"""The probe: after every transfer, vLLM must say of fixed rows what Megatron says of them with the same weights.

Weights that came in part, were left out, or are of an older version are loaded without an error, and so is a cache of
keys and values that was computed by them. Each changes the log-probabilities of fixed rows. Two questions tell them
apart: rows are read at once, which uses no cache, and tokens are written behind the same rows, which does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from conf.schema.run import Run
from contract.faults import Fault

BOUNDS = {"fp32": 1e-4, "bf16": 0.05}  # mean difference, nats a token
WRITTEN = 4  # tokens behind each row


@dataclass(frozen=True)
class Differences:
    """Mean absolute differences, nats a token."""

    read: float
    written: float


def bound(run: Run) -> float:
    return run.reinforce.probe_bound or BOUNDS[run.train.precision]


def rows(tokens: Sequence[list[int]], count: int, length: int) -> list[list[int]]:
    """Rows of so many tokens, each of which is several rows of the data: longer than blocks of a cache are."""
    endless = list(chain(*tokens)) or [0]
    found = []
    for number in range(count):
        start = number * len(endless) // count
        found.append([endless[(start + place) % len(endless)] for place in range(length)])
    return found


def mean(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def require_same_prompts(asked: Sequence[list[int]], read: Sequence[list[int]]) -> None:
    """Raise a Fault where vLLM says that it has read another prompt than it was asked."""
    for mine, theirs in zip(asked, read, strict=True):
        if mine != theirs:
            place = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
            raise Fault(
                f"probe: vLLM has read another prompt than the template makes of a row: {len(theirs)} tokens, not "
                f"{len(mine)}, and another one at {place}"
            )


def judge(differences: Differences, limit: float, before: float | None, versions: tuple[int, int]) -> None:
    """Raise a Fault where vLLM and Megatron disagree, with the likeliest reason.

    `before` is how far vLLM is from what Megatron said with the version before; `versions` are the one that vLLM says
    it has, and the one that it was given.
    """
    has, given = versions
    if has != given:
        raise Fault(f"probe: vLLM has weights of version {has}, not of {given}: they were not transferred")
    if differences.read <= limit and differences.written <= limit:
        return
    apart = f"probe: vLLM and Megatron differ by {max(differences.read, differences.written):.3g} nats a token with "
    apart += f"weights of version {given}, the bound is {limit:.3g} (reinforce.probe_bound)"
    if before is not None and before <= limit < differences.read:
        raise Fault(f"{apart}: vLLM still computes with the version before")
    if differences.read <= limit:
        raise Fault(f"{apart}: only behind prompts that it knew before, so its prefix cache is of an older version")
    raise Fault(f"{apart}: weights were lost or changed on the way, or are loaded otherwise than they are trained")
