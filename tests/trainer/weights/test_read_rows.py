"""Rows that are read are those of the file, wherever they begin, and so is their checksum."""

import hashlib

import numpy as np
import pytest
import torch
import xxhash

from conf.model_files.weights import Entry
from contract.faults import Fault
from trainer.weights.mapped.read_rows import ReadRows

ROWS, COLUMNS = 50, 30


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(np.random.default_rng(1).bytes(8192))
    return path


def rows_of(path, start: int, recorded: str = "") -> ReadRows:
    entry = Entry("BF16", (ROWS, COLUMNS), path.name, start, 2 * ROWS * COLUMNS)
    return ReadRows(path, entry, torch.bfloat16, "test", recorded)


@pytest.mark.parametrize("start", [0, 2, 3, 4096])
def test_rows_and_their_checksum_are_those_of_the_file(file, start):
    content = file.read_bytes()[start : start + 2 * ROWS * COLUMNS]
    rows, found = rows_of(file, start), b""
    for first in range(0, ROWS, 16):
        some = rows[first : first + 16]
        assert some.shape == (min(16, ROWS - first), COLUMNS) and some.dtype == torch.bfloat16
        found += some.view(torch.uint8).numpy().tobytes()
    assert found == content
    assert rows.has_sum(xxhash.xxh3_128_hexdigest(content)) and not rows.has_sum(xxhash.xxh3_128_hexdigest(b""))


def test_the_checksum_is_of_the_kind_of_the_recorded_one(file):
    content = file.read_bytes()[: 2 * ROWS * COLUMNS]
    rows = rows_of(file, 0, hashlib.sha256(content).hexdigest())
    assert rows[:ROWS].shape == (ROWS, COLUMNS) and rows.is_recorded


def test_rows_that_were_not_all_read_have_no_checksum(file):
    first = rows_of(file, 0)
    assert first[: ROWS - 1].shape == (ROWS - 1, COLUMNS)
    assert not first.has_sum(xxhash.xxh3_128_hexdigest(file.read_bytes()[: 2 * (ROWS - 1) * COLUMNS]))


def test_a_file_that_ends_early_is_told(file):
    with pytest.raises(Fault, match=r"rows: ends 12 bytes early"):
        rows_of(file, 8192 - 2 * ROWS * COLUMNS + 12)[:ROWS]
