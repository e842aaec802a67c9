"""Encoding of conversations by a chat template or a Jinja file, rendered by transformers and tokenised in one piece.

A pair of input and output is a conversation of two turns. trainer/data/tokens/spans.py decides what is learned. A row
that is too long loses tokens at the end of its longest message of a user, a system prompt or a tool. Text of the
template and text that is learned stay.
"""

# pyright: reportArgumentType=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contract.faults import Fault
from trainer.data.rows import Bad, Row, show
from trainer.data.tokens import rendering
from trainer.data.tokens import spans as spanned
from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.encoded import Encoded
from trainer.data.tokens.spans import Refused, Rendered, Span
from trainer.data.tokens.template_text import TemplateText
from trainer.startup.limited_calls import Exceeded

Messages = list[dict[str, Any]]
MARK = "\ue000"  # stands for an answer, to see where the template puts it; a character for private use


class Unrendered(Fault):
    """A template exceeds its limits with a row, by its number among those to encode."""

    row = 0


def conversation(row: Row) -> Messages:
    if "messages" in row:
        return row["messages"]
    return [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]


def encode(template: TemplateText, rows: Sequence[Row]) -> list[Encoded | Bad]:
    done = [_try(template, row, number) for number, row in enumerate(rows)]
    texts = [one.text + template.appended(one.text) for one in done if isinstance(one, Rendered)]
    found = tokenizers.encodings(template.tokenizer, texts)
    return [
        one if isinstance(one, Bad) else _encoded(template, row, one, next(found))
        for row, one in zip(rows, done, strict=True)
    ]


def _try(template: TemplateText, row: Row, number: int) -> Rendered | Bad:
    try:
        return rendered(template, row)
    except Refused as error:
        return error.bad
    except Unrendered as error:
        error.row = number
        raise


def rendered(template: TemplateText, row: Row) -> Rendered:
    if not template.uses_messages:
        return _around_answer(template, row)
    messages, tools = conversation(row), row.get("tools")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    source = template.source(tools)
    if spanned.GENERATION.search(source):
        text, spans = render(template, messages, tools, tracked=True)
        # Where there is one turn of the assistant, no second rendering is needed to find the last.
        earlier = len(render(template, messages[: turns[-1]], tools, tracked=True)[1]) if len(turns) > 1 else 0
        found = spanned.by_tags(text, spans, earlier)
        return found if template.loss_on != "answer" else Rendered(found.text, spans[earlier:], found.last)

    def shorter(messages: Messages, prompt: bool) -> str:
        return render(template, messages, tools, prompt)[0]

    text = shorter(messages, False)
    return spanned.by_prefixes(shorter, messages, text, turns if template.loss_on == "assistant" else turns[-1:])


def _around_answer(template: TemplateText, row: Row) -> Rendered:
    """Render a Jinja file with input and output."""
    mark = MARK
    while mark in row["input"]:
        mark += MARK
    marked, _ = render(template, [], None, variables={"input": row["input"], "output": mark})
    text, spans = render(template, [], None, tracked=True, variables={"input": row["input"], "output": row["output"]})
    if spans:
        return spanned.by_tags(text, spans, 0)
    start = marked.find(mark)
    if start < 0 or not text.startswith(marked[:start]):
        raise Refused(Bad("template hides the answer", "output", "it renders otherwise with another answer"))
    start -= marked[:start].endswith(" ")  # one token with the answer's first word
    return Rendered(text, [(start, len(text))], start)


def render(
    template: TemplateText,
    messages: Messages,
    tools: list | None,
    prompt: bool = False,
    tracked: bool = False,
    variables: dict[str, str] | None = None,
) -> tuple[str, list[Span]]:
    """Render as tokenizer.apply_chat_template(tokenize=False) does, and find where {% generation %} stands."""
    source = template.source(tools)
    tracked = tracked and spanned.GENERATION.search(source) is not None
    try:
        texts, spans = rendering.render(
            conversations=[messages],
            tools=tools,
            chat_template=source,
            return_assistant_tokens_mask=tracked,
            add_generation_prompt=prompt,
            **template.variables,
            **(variables or {}),
        )
    except rendering.Refused as error:
        raise Refused(Bad("template refuses it", "messages", str(error))) from None
    except Exceeded as error:
        row = show(variables["input"] if variables else messages)
        raise Unrendered(f"{_file(template)}: the template {error} with the row {row}; repair it") from None
    return texts[0], spans[0] if tracked else []


def _file(template: TemplateText) -> Path:
    """The file that holds the template."""
    if template.origin.endswith(".jinja"):
        return Path(template.origin)
    folder = Path(template.tokenizer.name_or_path)
    file = folder / "chat_template.jinja"
    return file if file.is_file() else folder / "tokenizer_config.json"


def _encoded(template: TemplateText, row: Row, one: Rendered, encoding) -> Encoded | Bad:
    ids = np.array(encoding.ids, dtype=np.int32)
    length = len(one.text) + len(template.appended(one.text))
    learned = np.zeros(len(ids), dtype=bool)
    first = len(ids)
    for span in one.spans:
        first, last = spanned.tokens(encoding, span, length, one.inside)
        learned[first:last] = True
    start = (
        first
        if len(one.spans) and one.spans[-1][0] == one.last
        else spanned.tokens(encoding, (one.last, length), length, one.inside)[0]
    )
    if length > len(one.text):
        learned[spanned.tokens(encoding, (len(one.text), length), length, False)[0] :] = True
    if not learned.any():
        return Bad("nothing to learn", "messages")
    if len(ids) > template.limit.tokens:
        return _shortened(template, row, one, encoding, ids, learned, start)
    return _finished(template, ids, learned, start, 0, one.odd)


def _finished(template: TemplateText, ids, learned, start: int, cut: int, odd: bool) -> Encoded | Bad:
    counting = template.counting[ids]
    learned = counting if template.loss_on == "all" else learned & counting
    return Encoded(ids, learned, start, cut, odd) if learned.any() else Bad("nothing to learn", "messages")


def _shortened(template: TemplateText, row: Row, one: Rendered, encoding, ids, learned, start: int) -> Encoded | Bad:
    limit = template.limit
    excess = len(ids) - limit.tokens
    if limit.too_long != "truncate":
        return limit.too_long_row(len(ids))
    kept = np.ones(len(ids), dtype=bool)
    for begin, end in _longest_first(template, row, one, encoding):
        free = np.flatnonzero(~learned[begin:end]) + begin
        out = free[1:][-excess:] if excess else free[:0]  # one token stays: an empty message is another conversation
        kept[out] = False
        excess -= len(out)
    if excess:
        return limit.too_long_answer(int(learned.sum()))
    cut = int((~kept).sum())
    return _finished(template, ids[kept], learned[kept], start - int((~kept[:start]).sum()), cut, one.odd)


def _longest_first(template: TemplateText, row: Row, one: Rendered, encoding) -> list[Span]:
    """Spans of tokens of each message that is no answer, as far as its text can be found again."""
    found, place = [], 0
    contents = [(message["role"], message.get("content")) for message in conversation(row)]
    for role, content in contents:
        text = content.strip() if isinstance(content, str) else ""
        at = one.text.find(text, place) if text else -1
        if at < 0:
            continue
        place = at + len(text)
        if role != "assistant":
            found.append(spanned.tokens(encoding, (at, place), len(one.text), False))
    return sorted(found, key=lambda span: span[0] - span[1])


def prompt_and_answer(template: TemplateText, row: Row) -> tuple[str, str]:
    """Text up to the last answer, and the answer with its stop."""
    one = rendered(template, row)
    whole = one.text + template.appended(one.text)
    end = len(whole) if len(whole) > len(one.text) or not one.spans else one.spans[-1][1]
    (encoding,) = tokenizers.encodings(template.tokenizer, [whole])
    token = spanned.tokens(encoding, (one.last, len(whole)), len(whole), one.inside)[0]
    start = encoding.token_to_chars(token)[0] if token < len(encoding) else len(whole)
    return whole[:start], whole[start:end]
