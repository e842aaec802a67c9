"""Learned spans of a rendered conversation: which characters, and which tokens.

Characters are found in two ways. A template with {% generation %} marks them, and transformers records the spans. With
any other template the conversation is rendered again for each answer: up to the answer, with the generation prompt, as
a served model gets it. The text after that, up to the end of the rendering with the answer, is learned. Each shorter
rendering must be a prefix of the whole. That is checked, because templates may drop the reasoning of earlier turns.
"""

import re
from dataclasses import dataclass
from typing import Any

from trainer.data.rows import Bad, Refused

Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: list[Span]  # of each learned turn; the last one is the last answer's
    last: int  # where the last answer begins
    inside: bool = True  # whether a token that begins before a span and ends in it is learned
    odd: bool = False  # the text before the last answer is not the generation prompt


def by_tags(text: str, spans: list[Span], earlier: int) -> Rendered:
    """Return text and spans of a rendering with tags. The first `earlier` spans precede the last answer."""
    of_last = spans[earlier:]
    return Rendered(text, spans, of_last[0][0] if of_last else len(text))


def by_prefixes(render, messages: list[dict[str, Any]], text: str, turns: list[int]) -> Rendered:
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


def tokens(encoding, span: Span, length: int, inside: bool) -> Span:
    """Return the tokens of a span as (first, last + 1), in a text of `length` characters.

    transformers goes from the token of the first character to the first token of the last one. A character may be
    several tokens, which all belong to the span. It may also have no token if the tokenizer drops it, which
    transformers does not handle.
    """
    start, end = span
    first = _at(encoding, start, length)
    if not inside and first < len(encoding) and encoding.token_to_chars(first)[0] < start:
        first = _after(encoding, first, start)
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


def _after(encoding, token: int, start: int) -> int:
    while token < len(encoding) and encoding.token_to_chars(token)[0] < start:
        token += 1
    return token
