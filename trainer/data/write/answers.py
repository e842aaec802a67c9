"""Two answers to one prompt as the writer of token files takes them: the chosen one, and behind it the rejected one."""

import numpy as np

from trainer.data.write.spool import Sequences


class Answers:
    """Rows of which each row of the spool is two: number 2i is the chosen answer of row i, 2i + 1 the rejected one."""

    def __init__(self, pairs: Sequences, first: np.ndarray):
        self.pairs = pairs
        self.lengths = np.stack([first, pairs.lengths - first], axis=1).ravel()

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and what is learned of these rows, in which both answers of a pair stand side by side."""
        return self.pairs.tokens(rows[::2] // 2)
