"""Anomalies of rows for the report; such rows are encoded, and none of these is an error.

special token in a row's text      "<|im_end|>" written by a user ends a turn: an injection, or text already rendered
answer without an end              the last learned token is neither special nor a stop: a model would not stop unknown
token                      text that the tokenizer has no token for two beginnings of text             both the template
and the row write one generation prompt differs          a served model gets another text before an answer than training
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
    """Return the indexes of anomalous rows, by anomaly."""
    special, tokenizer = set(template.special.values()), template.tokenizer
    stops = template.kind == "text" or bool(template.stop)
    unknown, bos = tokenizer.unk_token_id, tokenizer.bos_token_id
    numbered = list(enumerate(encoded))
    indexes = (
        [i for i, row in enumerate(rows) if any(_names_special(template, text) for text in texts(row))],
        [] if stops else [i for i, tokens in numbered if _endless(tokens, special)],
        [] if unknown is None else [i for i, tokens in numbered if (tokens.ids == unknown).any()],
        [] if bos is None else [i for i, tokens in numbered if tokens.ids[:2].tolist() == [bos, bos]],
        [i for i, tokens in numbered if tokens.odd],
    )
    return dict(zip(NAMES, indexes, strict=True))


def _names_special(template: TemplateText, text: str) -> bool:
    return any(start in text for start in template.special_starts) and bool(template.special_names.search(text))


def _endless(row: Encoded, special: set[int]) -> bool:
    """Whether neither of the last two tokens is special; a line break may follow the end of a turn."""
    return special.isdisjoint(row.ids[row.learned][-2:].tolist())


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
