"""What is odd about rows that could be made into tokens, for the report; none of it is an error.

special token in a row's text      "<|im_end|>" written by a user ends a turn: an injection, or text rendered before
answer without an end              what is learned last is no special token and no stop: a model would not stop
unknown token                      text that the tokenizer has no token for
two beginnings of text             the template writes one, and so does the row
generation prompt differs          a served model is shown something else than stands in front of answers here
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.data import tokenizer as tokenizers
from trainer.data.encoded import Encoded
from trainer.data.rows import Row

if TYPE_CHECKING:
    from trainer.data.templates import Template

NAMES = (
    "special token in a row's text",
    "answer without an end",
    "unknown token",
    "two beginnings of text",
    "generation prompt differs",
)


def find(template: "Template", encoded: Sequence[Encoded], rows: Sequence[Row]) -> dict[str, list[int]]:
    """The rows' positions by what is odd about them."""
    names, tokenizer = template.special, template.tokenizer
    ids = np.array(sorted(names.values()), dtype=np.int32)
    ends = (
        [] if template.kind == "text" or template.stop else [i for i, one in enumerate(encoded) if _endless(one, ids)]
    )
    unknown, bos = tokenizer.unk_token_id, tokenizer.bos_token_id
    written = [i for i, row in enumerate(rows) if any(map(template.special_names.search, texts(row)))]
    return {
        NAMES[0]: written,
        NAMES[1]: ends,
        NAMES[2]: [] if unknown is None else [i for i, one in enumerate(encoded) if (one.ids == unknown).any()],
        NAMES[3]: []
        if bos is None
        else [i for i, one in enumerate(encoded) if len(one.ids) > 1 and one.ids[0] == one.ids[1] == bos],
        NAMES[4]: [i for i, one in enumerate(encoded) if one.odd],
    }


def _endless(one: Encoded, special: np.ndarray) -> bool:
    """Neither of the last two is special: a line break may follow the end of a turn."""
    return not np.isin(one.ids[one.learned][-2:], special).any()


def pattern(tokenizer: tokenizers.Tokenizer) -> re.Pattern[str]:
    names = sorted(tokenizers.special(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def texts(row: Row) -> list[str]:
    if "messages" not in row:
        return [row[key] for key in ("input", "output", "text") if key in row]
    return [
        value
        for message in row["messages"]
        for key, value in message.items()
        if isinstance(value, str) and key != "role"
    ]
