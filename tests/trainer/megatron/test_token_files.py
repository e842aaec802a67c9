"""trainer/megatron/token_files.py: batches of two answers a row, and of what a teacher says, as Bridge cuts them."""

import numpy as np
import pytest

from trainer.data import references
from trainer.data.references import Likeliest
from trainer.data.write import sequences_file

LENGTH, END = 8, 0
pytestmark = pytest.mark.filterwarnings("ignore")  # what Megatron warns of when it is imported


class Drawn:
    """Sequences of 4 to 7 tokens, of which all but the first two are learned."""

    def __init__(self, count: int):
        self.lengths = np.array([4 + number % 4 for number in range(count)])

    def ids(self, row: int) -> np.ndarray:
        return np.arange(self.lengths[row], dtype=np.int32) + 10 * (row + 1)

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        learned = [np.arange(self.lengths[row]) > 1 for row in rows]
        return np.concatenate([self.ids(row) for row in rows]), np.concatenate(learned)


@pytest.fixture
def drawn(tmp_path):
    """drawn(rows, of each): the sequences of a token file with so many in a row."""

    def drawn(rows: int, each: int) -> Drawn:
        source, order = Drawn(rows * each), np.arange(rows * each, dtype=np.int32)
        bounds = np.arange(0, rows * each + 1, each)
        sequences_file.write(tmp_path / "training.idx.parquet", source, order, bounds, pad_to=None, pad_id=END)
        return source

    return drawn


def test_both_answers_of_a_row_are_in_the_same_micro_batch_however_a_step_is_cut(drawn, tmp_path):
    from trainer.startup import device  # noqa: F401, I001
    from megatron.bridge.data.batch_utils import split_batch_into_microbatches

    from trainer.megatron.token_files import Answers, TokenFiles

    source = drawn(rows=4, each=2)
    said = np.arange(8, dtype=np.float32).reshape(4, 2)
    references.write(tmp_path, "training", said)
    shared = {"seq_length": LENGTH, "pad_id": END, "seed": 1, "do_validation": False, "dataloader_type": "batch"}
    rows, *_ = TokenFiles(folder=str(tmp_path), reference=str(tmp_path), **shared).build_datasets(None)
    assert isinstance(rows, Answers) and len(rows) == 4
    order = [2, 0, 3, 1]
    step = rows.collate_fn([rows[row] for row in order])
    for cut in (1, 2, 4):
        parts = split_batch_into_microbatches(step, cut)
        pairs = [(batch, at) for batch in parts for at in range(0, len(batch["tokens"]), 2)]
        for row, (batch, at) in zip(order, pairs, strict=True):
            assert batch["reference"][at : at + 2].tolist() == said[row].tolist()
            for side in (0, 1):
                ids = source.ids(2 * row + side)
                assert batch["tokens"][at + side, : len(ids) - 1].tolist() == ids[:-1].tolist()
                learned = batch["labels"][at + side][batch["loss_mask"][at + side] > 0]
                assert learned.tolist() == ids[2:].tolist()


def test_a_teacher_s_tokens_stand_where_their_label_is_learned(drawn, tmp_path):
    from trainer.megatron.token_files import Taught, file

    source = drawn(rows=3, each=1)
    counts = source.lengths - 2
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = np.concatenate([source.ids(row)[2:] for row in range(3)])[:, None] + np.array([[0, 100]], np.int32)
    said = Likeliest(-ids.astype(np.float32), ids, starts)
    references.write(tmp_path, "training", said)
    found = references.read(tmp_path, "training")
    assert isinstance(found, Likeliest)
    rows = Taught(file(tmp_path, "training"), LENGTH, END, found)
    batch = rows.collate_fn([rows[row] for row in (2, 0, 1)])
    learned = batch["loss_mask"] > 0
    assert batch["teacher_ids"][..., 0][learned].tolist() == batch["labels"][learned].tolist()
    assert (batch["teacher_values"] == -batch["teacher_ids"].float()).all()
    assert not batch["teacher_ids"][~learned].any()
