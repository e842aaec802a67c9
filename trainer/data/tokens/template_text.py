"""Text of a template, the variables for rendering it, and the tokenizer; rows as tokens, and the limit on their length.

templates.py encodes.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from trainer.data.rows import Bad
from trainer.data.tokens import tokenizer as tokenizers

Kind = Literal["plain", "chat", "jinja", "text"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row, and which of them count in the loss; the others are context."""

    ids: np.ndarray  # int32
    learned: np.ndarray  # bool, at the learned token itself, not at the position that predicts it
    start: int  # where the last answer begins
    cut: int = 0  # tokens removed from the prompt
    odd: bool = False  # whether the text before the last answer differs from the generation prompt
    first: int = 0  # tokens of the prompt and the chosen answer, which precede the prompt and the rejected answer

    def before(self, other: "Encoded") -> "Encoded":
        """Append a rejected answer to this chosen one."""
        ids, learned = (np.concatenate(both) for both in ((self.ids, other.ids), (self.learned, other.learned)))
        return Encoded(ids, learned, self.start, self.cut + other.cut, self.odd or other.odd, len(self.ids))


@dataclass(frozen=True)
class TemplateText:
    """Text and settings of a template."""

    kind: Kind
    text: Any  # str; or several chat templates of a tokenizer, by name
    origin: str  # source of the text, for people
    loss_on: str
    stop: str  # text after the last answer, learned with it
    options: dict[str, bool | int | str]
    seq_length: int
    packed: bool
    too_long: str  # drop, truncate or error
    tokenizer: tokenizers.Tokenizer

    @property
    def most_tokens(self) -> int:
        """Return the limit of a row's tokens. A packed sequence has one more token, which is only a label."""
        return self.seq_length + 1 if self.packed else self.seq_length

    def too_long_row(self, tokens: int) -> Bad:
        return Bad("longer than a sequence", "", f"{tokens} tokens, data.seq_length is {self.seq_length}")

    def too_long_answer(self, tokens: int) -> Bad:
        return Bad("answer longer than a sequence", "", f"{tokens} tokens, data.seq_length is {self.seq_length}")

    def without_end(self, answer: str) -> str:
        """Return a model's answer without its stop."""
        answer = answer.removesuffix(self.stop).rstrip()
        end = next((name for name in self.special if answer.endswith(name)), "")
        return answer.removesuffix(end)

    @property
    def ends_by_text(self) -> list[str]:
        """Return the texts that end an answer, without the end of text, at which every model stops."""
        return [self.stop] if self.stop and self.stop != self.tokenizer.eos_token else []

    def source(self, tools: list | None) -> str:
        """Return the Jinja text for a conversation with these tools, chosen like transformers."""
        if isinstance(self.text, str):
            return self.text
        return self.text["tool_use" if tools is not None and "tool_use" in self.text else "default"]

    def appended(self, text: str) -> str:
        return "" if text.endswith(self.stop) else self.stop

    @cached_property
    def special(self) -> dict[str, int]:
        """Return the tokens that stand for no text, by their names."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        return {str(token): i for i, token in added if token.special} | dict(special)

    @cached_property
    def special_names(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special)) or "(?!)")

    @cached_property
    def special_starts(self) -> set[str]:
        """Return the beginnings of special tokens, for a fast search: nearly all begin with "<|"."""
        return {name[:2] for name in self.special}

    @cached_property
    def space(self) -> str:
        """Return the space before a plain answer, or ""."""
        space = split(self.text)[2]
        # If a space does not change the tokens of the text after it, Bridge omits it from the training text.
        first, second, both = tokenizers.ids(self.tokenizer, ["x", "y", "x y"])
        return "" if both == first + second else space

    @cached_property
    def end(self) -> list[int]:
        """Return the ids of the stop if it is the end of text, else none."""
        is_end = self.stop and self.stop == self.tokenizer.eos_token
        return [self.tokenizer.eos_token_id] if is_end else []

    @property
    def stop_text(self) -> str:
        """Return the stop of a plain answer if it is text. As in Bridge, the end of text is an id instead."""
        return "" if self.end else self.stop

    @cached_property
    def counting(self) -> np.ndarray:
        """Return flags by id: whether the token may count in the loss."""
        added = self.tokenizer.added_tokens_decoder
        flags = np.ones(max(len(self.tokenizer), max(added, default=0) + 1), dtype=bool)
        flags[[i for i, token in added.items() if str(token) in tokenizers.SKIPPED]] = False
        return flags

    @cached_property
    def variables(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map, **self.options}


def split(text: str) -> tuple[str, str, str]:
    """Return the parts of a plain template: the text before the input, the text after it, and a space before the answer
    or "".
    """
    before, between = text.removesuffix("{output}").split("{input}")
    return before, between.removesuffix(" "), " " if between.endswith(" ") else ""
