"""Spans of a rendered conversation that are learned: which characters, and which tokens those are.

There are two ways to find the characters. A template with {% generation %} marks them itself, and transformers notes
where. Any other template renders the conversation again for each answer, up to it and with the generation prompt, which
is what a served model is shown. The text that the whole has beyond that is learned, up to where the rendering with the
answer ends. Each shorter rendering must be how the whole begins. That is checked, since templates may drop what earlier
turns have thought.
"""

import re
from dataclasses import dataclass
from typing import Any

from trainer.data.rows import Bad

Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Refused(Exception):
    """A row that the template cannot render, or not so that it is known what to learn."""

    def __init__(self, bad: Bad):
        super().__init__(bad)
        self.bad = bad


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: list[Span]  # of each turn that is learned, the last answer's at the end
    last: int  # where the last answer begins
    inside: bool = True  # whether a token that begins in front of a span, and ends in it, is learned
    odd: bool = False  # the generation prompt is not what stands in front of the last answer


def by_tags(text: str, spans: list[Span], earlier: int) -> Rendered:
    """Text and spans of a rendering with tags. The first `earlier` spans lie in front of the last answer."""
    mine = spans[earlier:]
    return Rendered(text, spans, mine[0][0] if mine else len(text))


def by_prefixes(render, messages: list[dict[str, Any]], text: str, turns: list[int]) -> Rendered:
    """Text and spans by rendering the conversation up to each answer.

    render(messages, generation_prompt) returns a text. `turns` are those to learn, the last one last.
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
    # The generation prompt goes on where the answer begins, with <think> for example: as far as they agree it is shown.
    before = len(render(messages[:i], False))
    if text[:before] != shown[:before]:
        raise Refused(_changed(i))
    pairs = enumerate(zip(shown[before:], text[before:], strict=False), before)
    agree = next((at for at, (one, other) in pairs if one != other), len(text))
    content = messages[i].get("content")
    begins = text.find(content, before) if content else -1
    return (min(agree, begins) if begins >= 0 else agree), True


def _changed(i: int) -> Bad:
    return Bad(
        "template changes earlier turns",
        f"messages[{i}]",
        "it renders otherwise when turns follow; data.loss_on: answer learns the last alone",
    )


def tokens(encoding, span: Span, length: int, inside: bool) -> Span:
    """Tokens of a span, in a text of `length` characters, as (first, last + 1).

    transformers goes from the token of the first character to the first token of the last one. A character may be
    several tokens, which all belong here. It may also be none, if the tokenizer drops it, which transformers does not
    foresee.
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
    """Number of the first token of the character at a place, or of the next one that has a token."""
    for at in range(place, length):
        token = encoding.char_to_token(at)
        if token is not None:
            return token
    return len(encoding)


def _after(encoding, token: int, start: int) -> int:
    while token < len(encoding) and encoding.token_to_chars(token)[0] < start:
        token += 1
    return token
