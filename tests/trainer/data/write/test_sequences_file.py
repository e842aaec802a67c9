"""The token files hold what Megatron-Bridge's own packing writes for the same packs, and its dataset reads them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from trainer.data.write import packing, sequences_file

EOS = 0


class Rows:
    """A source in memory."""

    def __init__(self, lengths, seed: int = 0):
        random = np.random.default_rng(seed)
        self.lengths = np.array(lengths, np.int32)
        self.rows = [(random.integers(1, 500, n, np.int32), random.random(n) < 0.5) for n in lengths]

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, learned = zip(*(self.rows[row] for row in rows), strict=True)
        return np.concatenate(ids), np.concatenate(learned)


def test_holds_what_bridge_writes(tmp_path, as_bridge):
    """One row of each padded length, as which of several equal ones comes first is drawn at random."""
    source = Rows([7, 18, 40, 60, 83])
    lengths = packing.padded(source.lengths, 16)
    order, bounds = packing.assign(lengths, 96, 1)
    assert len(bounds) - 1 == 3
    sequences_file.write(tmp_path / "own.parquet", source, order, bounds, pad_to=16, pad_id=EOS)
    rows = [{"input_ids": ids.tolist(), "loss_mask": learned.tolist()} for ids, learned in source.rows]
    packs = [lengths[order[a:b]].tolist() for a, b in pairwise(bounds)]
    as_bridge(tmp_path, "packed_file", rows=rows, assignments=packs, pad_to=16, pad_id=EOS, capacity=96)
    own, bridge = (parquet.read_table(tmp_path / f"{name}.parquet") for name in ("own", "bridge"))
    assert own.column_names == bridge.column_names
    assert own.to_pydict() == bridge.to_pydict()


@given(st.lists(st.integers(2, 70), min_size=1, max_size=60), st.sampled_from([None, 1, 16]), st.integers(1, 300))
@settings(deadline=None, max_examples=50)
def test_any_rows(tmp_path_factory, lengths, pad_to, group):
    folder = tmp_path_factory.mktemp("any")
    source = Rows(lengths)
    if pad_to is None:
        order, bounds = np.arange(len(lengths)), np.arange(len(lengths) + 1)
    else:
        order, bounds = packing.assign(packing.padded(source.lengths, pad_to), 80, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences_file, "GROUP", group)
        sequences_file.write(folder / "own.parquet", source, order, bounds, pad_to=pad_to, pad_id=EOS)
    assert not (folder / "own.parquet.partial").exists()
    found = parquet.read_table(folder / "own.parquet").to_pylist()
    assert found == [expected(source, order[a:b], pad_to) for a, b in pairwise(bounds)]
    groups = parquet.read_metadata(folder / "own.parquet")
    sizes = iter([len(row["input_ids"]) for row in found])
    for at in range(groups.num_row_groups):
        tokens = [next(sizes) for _ in range(groups.row_group(at).num_rows)]
        assert len(tokens) == 1 or sum(tokens) <= group


def expected(source: Rows, rows: np.ndarray, pad_to: int | None) -> dict:
    """A row at a time, as Bridge does it."""
    ids, mask, starts = [], [], []
    for row in rows:
        own, learned = (part.tolist() for part in source.rows[row])
        filling = 0 if pad_to is None else -(len(own) - 1) % pad_to
        starts.append(len(ids))
        ids += own + [EOS] * filling
        mask += [int(value) for value in learned[1:]] + [0] * (filling + 1)
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


def test_bridge_s_dataset_reads_it(tmp_path, as_bridge):
    source = Rows([7, 17, 18, 40, 60, 33])
    order, bounds = packing.assign(packing.padded(source.lengths, 16), 64, 1)
    sequences_file.write(tmp_path / "own.idx.parquet", source, order, bounds, pad_to=16, pad_id=EOS)
    found = as_bridge(tmp_path, "read_packed", path="own.idx.parquet", pad_to=16, eos=EOS)
    rows = [expected(source, order[a:b], 16) for a, b in pairwise(bounds)]
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in rows]
    assert [row["loss_mask"] for row in found] == [row["loss_mask"] for row in rows]
    assert [row["seq_boundaries"][:-1] for row in found] == [row["seq_start_id"] for row in rows]


def test_equal_rows_give_equal_bytes(tmp_path):
    source = Rows(range(2, 60))
    for name in ("one", "two"):
        order, bounds = packing.assign(packing.padded(source.lengths, 16), 64, 1)
        sequences_file.write(tmp_path / name, source, order, bounds, pad_to=16, pad_id=EOS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_no_rows(tmp_path):
    sequences_file.write(
        tmp_path / "none", Rows([]), *packing.assign(np.zeros(0, np.int64), 64, 1), pad_to=16, pad_id=EOS
    )
    assert parquet.read_table(tmp_path / "none").num_rows == 0
