"""Two answers to one prompt, in the form for the writer of token files: the chosen one, then the rejected one."""

import numpy as np

from trainer.data.write.spool import Sequences


class Answers:
    """Each row of the spool as two rows: number 2i is the chosen answer of row i, 2i + 1 the rejected one."""

    def __init__(self, pairs: Sequences, first: np.ndarray):
        self.pairs = pairs
        self.lengths = np.stack([first, pairs.lengths - first], axis=1).ravel()

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and learned marks of these rows, in which both answers of a pair are adjacent."""
        return self.pairs.tokens(rows[::2] // 2)
