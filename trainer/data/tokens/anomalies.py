"""Anomalies of rows that could be made into tokens, for the report; none of them is an error.

special token in a row's text      "<|im_end|>" written by a user ends a turn: an injection, or text rendered before
answer without an end              what is learned last is no special token and no stop: a model would not stop
unknown token                      text that the tokenizer has no token for
two beginnings of text             the template writes one, and so does the row
generation prompt differs          a served model is shown something else than stands in front of answers here
"""

from collections.abc import Sequence

from trainer.data.rows import Row
from trainer.data.tokens.encoded import Encoded
from trainer.data.tokens.template_text import TemplateText

NAMES = (
    "special token in a row's text",
    "answer without an end",
    "unknown token",
    "two beginnings of text",
    "generation prompt differs",
)


def find(template: TemplateText, encoded: Sequence[Encoded], rows: Sequence[Row]) -> dict[str, list[int]]:
    """Positions of odd rows, by anomaly."""
    special, tokenizer = set(template.special.values()), template.tokenizer
    stops = template.kind == "text" or bool(template.stop)
    unknown, bos = tokenizer.unk_token_id, tokenizer.bos_token_id
    numbered = list(enumerate(encoded))
    found = (
        [i for i, row in enumerate(rows) if any(_names_special(template, text) for text in texts(row))],
        [] if stops else [i for i, one in numbered if _endless(one, special)],
        [] if unknown is None else [i for i, one in numbered if (one.ids == unknown).any()],
        [] if bos is None else [i for i, one in numbered if one.ids[:2].tolist() == [bos, bos]],
        [i for i, one in numbered if one.odd],
    )
    return dict(zip(NAMES, found, strict=True))


def _names_special(template: TemplateText, text: str) -> bool:
    return any(start in text for start in template.special_starts) and bool(template.special_names.search(text))


def _endless(one: Encoded, special: set[int]) -> bool:
    """Whether neither of the last two tokens is special: a line break may follow the end of a turn."""
    return special.isdisjoint(one.ids[one.learned][-2:].tolist())


def texts(row: Row) -> list[str]:
    if "chosen" in row:
        return [*texts(row["chosen"]), *texts(row["rejected"])]
    if "messages" not in row:
        return [row[key] for key in ("input", "output", "text") if key in row]
    return [
        value
        for message in row["messages"]
        for key, value in message.items()
        if isinstance(value, str) and key != "role"
    ]
