import numpy as np
import pytest

from trainer.data.write import spool
from trainer.data.write.spool import LEARNED, ChunkFile, Sequences, Spool

RANDOM = np.random.Generator(np.random.PCG64(0))
ROWS = [RANDOM.integers(0, 1 << 20, size).astype(np.uint32) for size in RANDOM.integers(1, 9, 40)]
MARKED = [np.where(RANDOM.random(len(row)) < 0.5, row | LEARNED, row) for row in ROWS]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """40 rows in chunks of 7, 0, 13 and 20."""
    folder, made = tmp_path_factory.mktemp("spool"), []
    for number, (start, end) in enumerate([(0, 7), (7, 7), (7, 20), (20, 40)]):
        rows = MARKED[start:end]
        arrays = {
            "tokens": np.concatenate(rows) if rows else np.empty(0, np.uint32),
            "length": np.array([len(row) for row in rows], np.int32),
        }
        made.append(folder / f"{number}.chunk")
        spool.write(made[-1], arrays, {"number": number})
    return made


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_tokens_come_back_in_any_order(paths, limit, monkeypatch):
    monkeypatch.setattr(spool, "OPEN", limit + spool.KEPT_FREE)
    found = Spool(paths)
    lengths = found.column("length", np.int32)
    assert lengths.tolist() == [len(row) for row in ROWS]
    assert [facts["number"] for facts in found.facts()] == [0, 1, 2, 3]
    for rows in (np.arange(40), RANDOM.permutation(40), np.array([39, 0, 1, 6, 7, 19, 20]), np.empty(0, np.int64)):
        ids, learned = Sequences(found, np.arange(40)).tokens(rows)
        expected = np.concatenate([MARKED[row] for row in rows]) if len(rows) else np.empty(0, np.uint32)
        assert ids.tolist() == (expected & ~LEARNED).tolist()
        assert learned.tolist() == (expected >= LEARNED).tolist()
        assert len(found.opened) <= limit


def test_some_rows_are_numbered_by_themselves(paths):
    found = Spool(paths)
    some = np.array([3, 8, 30])
    ids, _ = Sequences(found, some).tokens(np.array([2, 0]))
    assert ids.tolist() == [*ROWS[30].tolist(), *ROWS[3].tolist()]


def test_a_half_written_file_is_no_chunk(paths, tmp_path):
    half = tmp_path / "half.chunk"
    half.write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(ValueError, match="bytes expected"):
        ChunkFile(half)
    assert not list(paths[0].parent.glob("*.[0-9]*")), "partial files are gone"
