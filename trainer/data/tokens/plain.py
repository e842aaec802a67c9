"""Encoding like Megatron-Bridge's: a text with {input} and {output} for prompt and answer, or a text alone.

Prompt and answer are tokenised separately. A space before the answer belongs to the answer, because the space and the
first word form one token: a prompt that ends in a space would end in a token that training never has there. All other
text before the answer belongs to the prompt. As in Bridge, spaces around both are stripped, and a long prompt is cut at
its end. Bridge would also cut a long answer; here a row with a long answer is refused.
"""

from collections.abc import Sequence

import numpy as np

from trainer.data.rows import Bad, Row
from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.template_text import Encoded, TemplateText, split


def prompt(template: TemplateText, row: Row) -> str:
    before, after, _ = split(template.text)
    return before + row["input"].strip(" ") + after


def answer(template: TemplateText, row: Row) -> str:
    """Return the text after the prompt, without its stop."""
    return template.space + row["output"].strip(" ")


def encode(template: TemplateText, rows: Sequence[Row | Bad]) -> list[Encoded | Bad]:
    """Encode rows. A bad row stays."""
    good = [row for row in rows if not isinstance(row, Bad)]
    texts = [prompt(template, row) for row in good]
    texts += [answer(template, row) + template.stop_text for row in good]
    ids = tokenizers.ids(template.tokenizer, texts)
    encoded = (_join(template, ids[i], ids[i + len(good)] + template.end) for i in range(len(good)))
    return [row if isinstance(row, Bad) else next(encoded) for row in rows]


def _join(template: TemplateText, prompt: list[int], answer: list[int]) -> Encoded | Bad:
    length = len(prompt) + len(answer)
    cut = length - template.most_tokens
    if cut > 0:
        if template.too_long != "truncate":
            return template.too_long_row(length)
        if cut >= len(prompt):
            return template.too_long_answer(len(answer))
        prompt = prompt[:-cut]
    ids = np.array(prompt + answer, dtype=np.int32)
    learned = template.counting[ids]
    if template.loss_on != "all":
        learned[: len(prompt)] = False
    if not learned.any():
        return Bad("nothing to learn", "output")
    return Encoded(ids, learned, len(prompt), max(0, cut))


def encode_text(template: TemplateText, rows: Sequence[Row]) -> list[Encoded | Bad]:
    """Encode documents, each followed by the end of text. They are not cut: pretraining concatenates them."""
    token_ids = tokenizers.ids(template.tokenizer, [row["text"] + template.stop_text for row in rows])
    documents = [np.array(ids + template.end, dtype=np.int32) for ids in token_ids]
    return [Encoded(ids, np.ones(len(ids), dtype=bool), 0) for ids in documents]
