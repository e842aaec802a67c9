"""Text of a template, the variables it is rendered with, and the tokenizer. Encoding is in templates.py."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.encoded import Limit
from trainer.data.tokens.tokenizer import Tokenizer

Kind = Literal["plain", "chat", "jinja", "text"]


@dataclass(frozen=True)
class TemplateText:
    """Text and settings of a template."""

    kind: Kind
    text: Any  # str; or, of a tokenizer with several chat templates, those by name
    origin: str  # where the text comes from, for people
    loss_on: str
    stop: str  # text behind the last answer, learned with it
    options: dict[str, bool | int | str]
    limit: Limit
    tokenizer: Tokenizer

    def without_end(self, answer: str) -> str:
        """The answer of a model without its stop."""
        answer = answer.removesuffix(self.stop).rstrip()
        end = next((name for name in self.special if answer.endswith(name)), "")
        return answer.removesuffix(end)

    @property
    def ends_by_text(self) -> list[str]:
        """Texts that end an answer besides the end of text, at which every model stops."""
        return [self.stop] if self.stop and self.stop != self.tokenizer.eos_token else []

    def source(self, tools: list | None) -> str:
        """Jinja text for a conversation with these tools, as transformers chooses it."""
        if isinstance(self.text, str):
            return self.text
        return self.text["tool_use" if tools is not None and "tool_use" in self.text else "default"]

    def appended(self, text: str) -> str:
        return "" if text.endswith(self.stop) else self.stop

    @cached_property
    def special(self) -> dict[str, int]:
        return tokenizers.special(self.tokenizer)

    @cached_property
    def special_names(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special)) or "(?!)")

    @cached_property
    def special_starts(self) -> set[str]:
        """Beginnings of special tokens. They are cheap to look for: nearly all begin with "<|"."""
        return {name[:2] for name in self.special}

    @cached_property
    def uses_messages(self) -> bool:
        return self.kind == "chat"

    @cached_property
    def space(self) -> str:
        """The space in front of a plain answer, or nothing."""
        space = split(self.text)[2]
        return "" if space and tokenizers.splits_words(self.tokenizer) else space

    @cached_property
    def end(self) -> list[int]:
        """Ids of the stop, where it is the end of text; else none."""
        is_end = self.stop and self.stop == self.tokenizer.eos_token
        return [self.tokenizer.eos_token_id] if is_end else []

    @cached_property
    def counting(self) -> np.ndarray:
        return tokenizers.counting(self.tokenizer)

    @cached_property
    def variables(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map, **self.options}


def split(text: str) -> tuple[str, str, str]:
    """Parts of a plain template: the text before the input, the text after it, and a space before the answer or ""."""
    before, between = text.removesuffix("{output}").split("{input}")
    return before, between.removesuffix(" "), " " if between.endswith(" ") else ""
