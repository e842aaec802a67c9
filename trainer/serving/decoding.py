"""Check that a served model says the same of tokens when it writes them and when it reads them.

Serving computes the two by different code: writing takes keys and values from a cache, and latent attention other
weights. An adapter that counts in prompts alone, or keys and values kept of another adapter, show here and in no
comparison of prompts. Both sides are asked of one engine, so that training need not have written anything down.
"""

from typing import Any

TOKENS = 8  # written behind each prompt
KEPT = 0.9  # of the tokens, the closest: rounding sends a few of them to other experts, by one way and not by the other


Written = list[tuple[list[int], list[float]]]  # tokens and their log-probabilities, behind each prompt


def write(served: Any, prompts: list[list[int]]) -> Written:
    """Let the model go on behind the first half of each prompt."""
    return served.go_on([_begun(tokens) for tokens in prompts], TOKENS)


def compare(served: Any, prompts: list[list[int]], written: Written, bound: float) -> dict:
    """Differences over the tokens that the model has written, which it now reads."""
    whole = [[*_begun(start), *tokens] for start, (tokens, _) in zip(prompts, written, strict=True)]
    read = served.read(whole)
    pairs = [
        (one, other)
        for (tokens, log_probs), of_row in zip(written, read, strict=True)
        for one, other in zip(log_probs, of_row[-len(tokens) :], strict=True)
    ]
    return judge(pairs, bound)


def judge(pairs: list[tuple[float, float]], bound: float) -> dict:
    """The verdict on log-probabilities as written and as read."""
    apart = sorted(abs(one - other) if one == one and other == other else float("inf") for one, other in pairs)
    closest = apart[: max(1, round(len(apart) * KEPT))]
    mean = sum(closest) / len(closest)
    return {"ok": mean <= bound, "tokens": len(apart), "mean": mean, "max": apart[-1], "bound": bound}


def _begun(tokens: list[int]) -> list[int]:
    return tokens[: max(1, len(tokens) // 2)]


def told(found: dict) -> str:
    apart = f"{found['mean']:.3g} nats apart (bound {found['bound']:g})"
    return f"{found['tokens']} tokens as written and as read: {apart}"
