"""Rows as tokens, and the limit on their length."""

from dataclasses import dataclass

import numpy as np

from trainer.data.rows import Bad


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row, and which of them count in the loss: a model is asked for those, and shown the others."""

    ids: np.ndarray  # int32
    learned: np.ndarray  # bool, of the token itself and not of the one before it, which is asked for it
    start: int  # where the last answer begins
    cut: int = 0  # tokens of the prompt that were cut away
    odd: bool = False  # the generation prompt is not what stands in front of the last answer
    first: int = 0  # tokens of the chosen answer with its prompt, behind which the rejected one follows with the same

    def before(self, other: "Encoded") -> "Encoded":
        """Join a rejected answer behind this chosen one."""
        ids, learned = (np.concatenate(both) for both in ((self.ids, other.ids), (self.learned, other.learned)))
        return Encoded(ids, learned, self.start, self.cut + other.cut, self.odd or other.odd, len(self.ids))


@dataclass(frozen=True)
class Limit:
    """Limit of a row's tokens. A packed sequence is stored with one more, which is only ever a label."""

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
