"""Check that a served model gives tokens the same log-probabilities when it writes them and when it reads them.

vLLM computes the two with different code: writing reads keys and values from a cache, and latent attention uses other
weights for it. This check detects an adapter that has an effect only on prompts, and cached keys and values of another
adapter; a comparison of prompts cannot. It needs one engine and no record of the training.
"""

from typing import Any

TOKENS = 8  # written after the first half of each prompt
# Share of the tokens that is compared, without those that differ most: rounding may send a few to other experts.
COMPARED = 0.9


Written = list[tuple[list[int], list[float]]]  # tokens and their log-probabilities, for each prompt


def write(served: Any, prompts: list[list[int]]) -> Written:
    """Let the model continue the first half of each prompt."""
    return served.continue_prompts([_first_half(tokens) for tokens in prompts], TOKENS)


def compare(served: Any, prompts: list[list[int]], written: Written, bound: float) -> dict:
    """Let the model read the tokens that it has written, and compare the log-probabilities."""
    whole = [[*_first_half(prompt), *tokens] for prompt, (tokens, _) in zip(prompts, written, strict=True)]
    read = served.read(whole)
    pairs = [
        pair
        for (tokens, log_probs), of_row in zip(written, read, strict=True)
        for pair in zip(log_probs, of_row[-len(tokens) :], strict=True)
    ]
    return judge(pairs, bound)


def judge(pairs: list[tuple[float, float]], bound: float) -> dict:
    """Return the verdict on pairs of log-probabilities: when written, and when read."""
    differences = sorted(abs(a - b) if a == a and b == b else float("inf") for a, b in pairs)
    closest = differences[: max(1, round(len(differences) * COMPARED))]
    mean = sum(closest) / len(closest)
    return {"ok": mean <= bound, "tokens": len(differences), "mean": mean, "max": differences[-1], "bound": bound}


def _first_half(tokens: list[int]) -> list[int]:
    return tokens[: max(1, len(tokens) // 2)]


def summary(verdict: dict) -> str:
    difference = f"{verdict['mean']:.3g} nats apart (bound {verdict['bound']:g})"
    return f"{verdict['tokens']} tokens as written and as read: {difference}"
