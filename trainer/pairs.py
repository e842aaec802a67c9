"""How an input/output pair becomes text: data.template cut where the prompt ends and what is learned begins.

A space before the answer is one token with the answer's first word, and so belongs to it: a prompt that ends in a space
ends in a token that training has never seen there. All else before the answer belongs to the prompt.
"""

import json
from pathlib import Path

from trainer.faults import Fault


def split(template: str) -> tuple[str, str, str]:
    """(text before the input, text after it, a space or nothing in front of the answer)"""
    before, between = template.removesuffix("{output}").split("{input}")
    return before, between.removesuffix(" "), " " if between.endswith(" ") else ""


def prompt(template: str, row: dict) -> str:
    before, after, _ = split(template)
    return before + row["input"].strip(" ") + after  # Megatron-Bridge strips spaces, and nothing else


def answer(template: str, row: dict, tokenizer) -> str:
    """What follows the prompt, without the end of text."""
    space = split(template)[2]
    if space and tokenizer_splits_words(tokenizer):
        space = ""
    return space + row["output"].strip(" ")


def tokenizer_splits_words(tokenizer) -> bool:
    """Whether a space makes no difference to what follows it. Bridge then leaves it out of the training text."""
    apart = [encode(tokenizer, word) for word in ("x", "y")]
    return encode(tokenizer, "x y") == apart[0] + apart[1]


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read(path: Path, rows: int | None = None) -> list[dict]:
    """The first rows of a file of pairs."""
    found = []
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if len(found) == rows:
                break
            if line.strip():
                found.append(_row(line, f"{path}:{number}"))
    return found


def _row(line: str, place: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError:
        raise Fault(f"{place}: not a JSON object") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("input", "output")):
        raise Fault(f"{place}: input or output missing, or not text")
    return row
