"""Anomalies of rows for the report. They are not errors: rows with anomalies are encoded.

special token in a row's text    "<|im_end|>" in a user's text ends a turn: an injection, or text already rendered
answer without an end            the last learned token is neither special nor a stop: the model would not stop
unknown token                    the tokenizer has no token for a part of the text
two beginnings of text           both the template and the row write one
generation prompt differs        the text before an answer differs between training and a served model
"""

from collections.abc import Sequence

from trainer.data.rows import Row
from trainer.data.tokens.template_text import Encoded, TemplateText

ENDLESS = "answer without an end"


def find(template: TemplateText, encoded: Sequence[Encoded], rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the indexes of anomalous rows, by anomaly."""
    special, tokenizer = set(template.special.values()), template.tokenizer
    stops = template.kind == "text" or bool(template.stop)
    unknown, bos = (-1 if id is None else id for id in (tokenizer.unk_token_id, tokenizer.bos_token_id))
    numbered = list(enumerate(encoded))
    return {
        "special token in a row's text": [i for i, row in enumerate(rows) if _has_special(template, row)],
        # The last two tokens: a line break may follow the end of a turn.
        ENDLESS: [i for i, row in numbered if not stops and special.isdisjoint(row.ids[row.learned][-2:].tolist())],
        "unknown token": [i for i, tokens in numbered if (tokens.ids == unknown).any()],
        "two beginnings of text": [i for i, tokens in numbered if tokens.ids[:2].tolist() == [bos, bos]],
        "generation prompt differs": [i for i, tokens in numbered if tokens.odd],
    }


def _has_special(template: TemplateText, row: Row) -> bool:
    """Whether a text of the row names a special token. Most texts lack even the beginnings of such names."""
    likely = [text for text in texts(row) if any(start in text for start in template.special_starts)]
    return any(map(template.special_names.search, likely))


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
