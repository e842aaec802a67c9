"""Encoding of conversations by a chat template or a Jinja file, rendered by transformers and tokenised as one text.

A pair of input and output is a conversation of two turns. If a row is too long, the longest messages of users, system
prompts or tools are cut at their ends. The template's text and the learned text stay.

Learned characters are found in two ways. A template with {% generation %} marks them, and transformers records the
spans. With any other template the conversation is rendered again for each answer: up to the answer, with the generation
prompt, as a served model gets it. The text after that, up to the end of the rendering with the answer, is learned. Each
shorter rendering must be a prefix of the whole. That is checked, because templates may drop the reasoning of earlier
turns.
"""

# pyright: reportArgumentType=false

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contract.faults import Fault
from trainer.data.rows import Bad, Refused, Row, show
from trainer.data.tokens import rendering
from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.template_text import Encoded, TemplateText
from trainer.startup.limited_calls import Exceeded

Messages = list[dict[str, Any]]
Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "\ue000"  # placeholder for an answer, to find its position; a private-use character


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: list[Span]  # of each learned turn; the last one is the last answer's
    last: int  # where the last answer begins
    inside: bool = True  # whether a token that begins before a span and ends in it is learned
    odd: bool = False  # whether the text before the last answer differs from the generation prompt


class Unrendered(Fault):
    """A template exceeds its limits with a row, given by its index among those to encode."""

    row = 0


def conversation(row: Row) -> Messages:
    if "messages" in row:
        return row["messages"]
    return [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]


def encode(template: TemplateText, rows: Sequence[Row | Bad]) -> list[Encoded | Bad]:
    """Encode rows. A bad row stays."""
    results = [_try(template, row, number) for number, row in enumerate(rows)]
    texts = [result.text + template.appended(result.text) for result in results if isinstance(result, Rendered)]
    encodings = tokenizers.encodings(template.tokenizer, texts)
    return [
        _encoded(template, row, result, next(encodings)) if isinstance(result, Rendered) else result
        for row, result in zip(rows, results, strict=True)
    ]


def _try(template: TemplateText, row: Row | Bad, number: int) -> Rendered | Bad:
    try:
        return row if isinstance(row, Bad) else rendered(template, row)
    except Refused as error:
        return error.bad
    except Unrendered as error:
        error.row = number
        raise


def rendered(template: TemplateText, row: Row) -> Rendered:
    if template.kind == "jinja":
        return _around_answer(template, row)
    messages, tools = conversation(row), row.get("tools")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    source = template.source(tools)
    if GENERATION.search(source):
        text, spans = render(template, messages, tools, tracked=True)
        # With a single answer, no second rendering is needed to find the last one.
        earlier = len(render(template, messages[: turns[-1]], tools, tracked=True)[1]) if len(turns) > 1 else 0
        result = _by_tags(text, spans, earlier)
        return result if template.loss_on != "answer" else Rendered(result.text, spans[earlier:], result.last)

    def shorter(messages: Messages, prompt: bool) -> str:
        return render(template, messages, tools, add_generation_prompt=prompt)[0]

    text = shorter(messages, False)
    return _by_prefixes(shorter, messages, text, turns if template.loss_on == "assistant" else turns[-1:])


def _around_answer(template: TemplateText, row: Row) -> Rendered:
    """Render a Jinja file with input and output."""
    mark = MARK
    while mark in row["input"]:
        mark += MARK
    marked, _ = render(template, [], input=row["input"], output=mark)
    text, spans = render(template, [], tracked=True, input=row["input"], output=row["output"])
    if spans:
        return _by_tags(text, spans, 0)
    start = marked.find(mark)
    if start < 0 or not text.startswith(marked[:start]):
        raise Refused(Bad("template hides the answer", "output", "the text before the answer changes with the answer"))
    start -= marked[:start].endswith(" ")  # one token with the answer's first word
    return Rendered(text, [(start, len(text))], start)


def render(
    template: TemplateText, messages: Messages, tools: list | None = None, tracked: bool = False, **variables: Any
) -> tuple[str, list[Span]]:
    """Render like tokenizer.apply_chat_template(tokenize=False), and find the spans of {% generation %}."""
    source = template.source(tools)
    tracked = tracked and GENERATION.search(source) is not None
    try:
        texts, spans = rendering.render(
            conversations=[messages],
            tools=tools,
            chat_template=source,
            return_assistant_tokens_mask=tracked,
            **template.variables,
            **variables,
        )
    except rendering.Refused as error:
        raise Refused(Bad("template refuses it", "messages", str(error))) from None
    except Exceeded as error:
        row = show(variables.get("input", messages))
        raise Unrendered(f"{_file(template)}: the template {error} with the row {row}; fix it") from None
    return texts[0], spans[0] if tracked else []


def _file(template: TemplateText) -> Path:
    """Return the file with the template."""
    if template.origin.endswith(".jinja"):
        return Path(template.origin)
    folder = Path(template.tokenizer.name_or_path)
    file = folder / "chat_template.jinja"
    return file if file.is_file() else folder / "tokenizer_config.json"


def _encoded(template: TemplateText, row: Row, result: Rendered, encoding) -> Encoded | Bad:
    ids = np.array(encoding.ids, dtype=np.int32)
    length = len(result.text) + len(template.appended(result.text))
    learned = np.zeros(len(ids), dtype=bool)
    first = len(ids)
    for span in result.spans:
        first, last = _tokens(encoding, span, length, result.inside)
        learned[first:last] = True
    start = (
        first
        if len(result.spans) and result.spans[-1][0] == result.last
        else _tokens(encoding, (result.last, length), length, result.inside)[0]
    )
    if length > len(result.text):
        learned[_tokens(encoding, (len(result.text), length), length, False)[0] :] = True
    if not learned.any():
        return Bad("nothing to learn", "messages")
    cut = 0
    if len(ids) > template.most_tokens:
        if template.too_long != "truncate":
            return template.too_long_row(len(ids))
        kept = _shortened(template, row, result, encoding, learned)
        cut = int((~kept).sum())
        if len(ids) - cut > template.most_tokens:
            return template.too_long_answer(int(learned.sum()))
        start -= int((~kept[:start]).sum())
        ids, learned = ids[kept], learned[kept]
    counting = template.counting[ids]
    learned = counting if template.loss_on == "all" else learned & counting
    return Encoded(ids, learned, start, cut, result.odd) if learned.any() else Bad("nothing to learn", "messages")


def _shortened(template: TemplateText, row: Row, result: Rendered, encoding, learned: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens that remain if the longest messages are cut, as little as possible, at their ends."""
    excess = len(learned) - template.most_tokens
    kept = np.ones(len(learned), dtype=bool)
    for begin, end in _longest_first(row, result, encoding):
        free = np.flatnonzero(~learned[begin:end]) + begin
        # Keep one token: an empty message would change the conversation.
        removed = free[1:][-excess:] if excess else free[:0]
        kept[removed] = False
        excess -= len(removed)
    return kept


def _longest_first(row: Row, result: Rendered, encoding) -> list[Span]:
    """Return the token spans of messages that are not answers, the longest first, if their text is found in the
    rendering.
    """
    spans, place = [], 0
    for message in conversation(row):
        text = (message.get("content") or "").strip()
        at = result.text.find(text, place) if text else -1
        if at < 0:
            continue
        place = at + len(text)
        if message["role"] != "assistant":
            spans.append(_tokens(encoding, (at, place), len(result.text), False))
    return sorted(spans, key=lambda span: span[0] - span[1])


def _by_tags(text: str, spans: list[Span], earlier: int) -> Rendered:
    """Return text and spans of a rendering with tags. The first `earlier` spans precede the last answer."""
    of_last = spans[earlier:]
    return Rendered(text, spans, of_last[0][0] if of_last else len(text))


def _by_prefixes(render, messages: list[dict[str, Any]], text: str, turns: list[int]) -> Rendered:
    """Return text and spans by rendering the conversation up to each answer.

    render(messages, generation_prompt) returns a text. `turns` are the turns to learn, in order.
    """
    spans, odd = [], False
    for i in turns:
        start, odd = _start(render, messages, text, i)
        end = len(text)
        if i + 1 < len(messages):
            through = render(messages[: i + 1], False)
            if not text.startswith(through):
                raise Refused(_changed(i))
            end = len(through)
        spans.append((start, end))
    return Rendered(text, spans, spans[-1][0], inside=odd, odd=odd)


def _start(render, messages: list[dict[str, Any]], text: str, i: int) -> tuple[int, bool]:
    shown = render(messages[:i], True)
    if text.startswith(shown):
        return len(shown), False
    # The generation prompt may contain more, for example <think>: the common beginning is the prompt.
    before = len(render(messages[:i], False))
    if text[:before] != shown[:before]:
        raise Refused(_changed(i))
    pairs = enumerate(zip(shown[before:], text[before:], strict=False), before)
    agree = next((at for at, (left, right) in pairs if left != right), len(text))
    content = messages[i].get("content")
    begins = text.find(content, before) if content else -1
    return (min(agree, begins) if begins >= 0 else agree), True


def _changed(i: int) -> Bad:
    return Bad(
        "template changes earlier turns",
        f"messages[{i}]",
        "it renders differently when turns follow; data.loss_on: answer learns only the last answer",
    )


def _tokens(encoding, span: Span, length: int, inside: bool) -> Span:
    """Return the tokens of a span as (first, last + 1), in a text of `length` characters.

    transformers goes from the token of the first character to the first token of the last one. A character may be
    several tokens, which all belong to the span. It may also have no token if the tokenizer drops it, which
    transformers does not handle.
    """
    start, end = span
    first = _at(encoding, start, length)
    while not inside and first < len(encoding) and encoding.token_to_chars(first)[0] < start:
        first += 1
    last = _at(encoding, end, length)
    if last < len(encoding) and end > start and encoding.token_to_chars(last)[0] < end:
        last += 1
    return first, max(first, last)


def _at(encoding, place: int, length: int) -> int:
    """Return the index of the first token of the character at a place, or of the next character with a token."""
    for at in range(place, length):
        token = encoding.char_to_token(at)
        if token is not None:
            return token
    return len(encoding)


def prompt_and_answer(template: TemplateText, row: Row) -> tuple[str, str]:
    """Return the text up to the last answer, and the answer with its stop."""
    result = rendered(template, row)
    whole = result.text + template.appended(result.text)
    end = len(whole) if len(whole) > len(result.text) or not result.spans else result.spans[-1][1]
    (encoding,) = tokenizers.encodings(template.tokenizer, [whole])
    token = _tokens(encoding, (result.last, len(whole)), len(whole), result.inside)[0]
    start = encoding.token_to_chars(token)[0] if token < len(encoding) else len(whole)
    return whole[:start], whole[start:end]
