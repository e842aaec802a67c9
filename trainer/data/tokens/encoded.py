"""Rows as tokens, and the limit on their length."""

from dataclasses import dataclass

import numpy as np

from trainer.data.rows import Bad


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row, and which of them count in the loss; the others are context."""

    ids: np.ndarray  # int32
    learned: np.ndarray  # bool, at the learned token itself, not at the position that predicts it
    start: int  # where the last answer begins
    cut: int = 0  # tokens removed from the prompt
    odd: bool = False  # the text before the last answer is not the generation prompt
    first: int = 0  # tokens of prompt and chosen answer; prompt and rejected answer follow

    def before(self, other: "Encoded") -> "Encoded":
        """Append a rejected answer to this chosen one."""
        ids, learned = (np.concatenate(both) for both in ((self.ids, other.ids), (self.learned, other.learned)))
        return Encoded(ids, learned, self.start, self.cut + other.cut, self.odd or other.odd, len(self.ids))


@dataclass(frozen=True)
class Limit:
    """Limit of a row's tokens. A packed sequence is stored with one more token, which is only a label."""

    seq_length: int
    packed: bool
    too_long: str  # drop, truncate or error

    @property
    def tokens(self) -> int:
        return self.seq_length + 1 if self.packed else self.seq_length

    def too_long_row(self, tokens: int) -> Bad:
        return Bad("longer than a sequence", "", f"{tokens} tokens, data.seq_length is {self.seq_length}")

    def too_long_answer(self, tokens: int) -> Bad:
        return Bad("answer longer than a sequence", "", f"{tokens} tokens, data.seq_length is {self.seq_length}")
