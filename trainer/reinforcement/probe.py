"""The probe: after every transfer, vLLM and Megatron must give fixed rows the same log-probabilities.

Incomplete, missing or outdated weights cause no error. Neither does a cache of keys and values that was computed with
outdated weights. But each of them changes the log-probabilities of fixed rows. Two requests distinguish the cases:
reading whole rows does not use the cache, and writing tokens after the same rows uses it.
"""

from collections.abc import Sequence
from itertools import chain

from conf.schema.run import Run
from contract.faults import Fault

BOUNDS = {"fp32": 1e-4, "bf16": 0.05}  # mean difference, nats per token
WRITTEN = 4  # tokens after each row


def bound(run: Run) -> float:
    return run.reinforce.probe_bound or BOUNDS[run.train.precision]


def rows(tokens: Sequence[list[int]], count: int, length: int) -> list[list[int]]:
    """Return rows of `length` tokens. Several rows of the data are joined, to exceed a block of the cache."""
    endless = list(chain(*tokens)) or [0]
    result = []
    for number in range(count):
        start = number * len(endless) // count
        result.append([endless[(start + place) % len(endless)] for place in range(length)])
    return result


def mean(actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens of all rows."""
    pairs = [pair for rows in zip(actual, expected, strict=True) for pair in zip(*rows, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def require_same_prompts(sent: Sequence[list[int]], read: Sequence[list[int]]) -> None:
    """Raise a Fault if vLLM reports that it has read another prompt than the trainer has sent."""
    for own, reported in zip(sent, read, strict=True):
        if own != reported:
            place = next((at for at, (a, b) in enumerate(zip(own, reported, strict=False)) if a != b), len(own))
            raise Fault(
                f"probe: vLLM has read another prompt than the template makes of a row: {len(reported)} tokens, not "
                f"{len(own)}, and another one at {place}"
            )


def judge(differences: tuple[float, float], limit: float, before: float | None, versions: tuple[int, int]) -> None:
    """Raise a Fault if vLLM and Megatron disagree, with the likeliest reason.

    `differences` are the mean absolute differences of read and of written tokens, in nats per token.
    `before` is the difference of vLLM from Megatron's log-probabilities with the previous version. `versions` are the
    version that vLLM reports, and the version that was sent.
    """
    (reported, sent), (read, written) = versions, differences
    if reported != sent:
        raise Fault(f"probe: vLLM has weights of version {reported}, not of {sent}: they were not transferred")
    if read <= limit and written <= limit:
        return
    line = f"probe: vLLM and Megatron differ by {max(read, written):.3g} nats per token with "
    line += f"weights of version {sent}, the bound is {limit:.3g} (reinforce.probe_bound)"
    if before is not None and before <= limit < read:
        raise Fault(f"{line}: vLLM still computes with the previous version")
    if read <= limit:
        raise Fault(f"{line}: only after prompts that vLLM has read before: its prefix cache is of an older version")
    raise Fault(f"{line}: weights were lost or changed in the transfer, or vLLM loads them differently")
