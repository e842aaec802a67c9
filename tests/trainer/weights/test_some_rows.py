"""Rows of a stored weight are read by themselves, wherever they lie in its pieces."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from contract.faults import Fault
from trainer.weights import torch_dist
from trainer.weights.torch_dist import Place, Stored

NAME = "embedding.word_embeddings.weight"
WHOLE = torch.arange(40.0).view(10, 4)


@pytest.fixture
def pieces() -> list[MetadataIndex]:
    """Those that were asked for."""
    return []


@pytest.fixture
def stored(pieces) -> Stored:
    rows = {0: 3, 3: 4, 7: 3}
    chunks = [ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, 4))) for first, count in rows.items()]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), WHOLE.shape, chunks)
    places = {MetadataIndex(NAME, one.offsets): _StorageInfo(torch_dist.RELEASED, 0, 0) for one in chunks}
    place = Place(NAME, NAME, (), tuple(WHOLE.shape), torch.float32, tuple(chunks))

    def make(index: MetadataIndex) -> torch.Tensor:
        pieces.append(index)
        first = index.offset[0] if index.offset else 0
        return WHOLE[first : first + rows[first]]

    return Stored(Path("base"), Metadata({NAME: tensor}, storage_data=places), {NAME: place}, make=make)


@pytest.mark.parametrize("rows", [[0], [9, 0, 3], list(range(10)), [4, 4]])
def test_rows_are_those_of_the_weight(rows, stored):
    assert torch.equal(torch_dist.some_rows(stored, NAME, rows), torch_dist.read(stored, stored.places[NAME])[rows])


def test_pieces_without_one_of_them_are_left_alone(stored, pieces):
    torch_dist.some_rows(stored, NAME, [8, 9])
    assert {index.offset for index in pieces} == {torch.Size((7, 0))}


def test_a_row_that_is_not_stored_is_told(stored):
    with pytest.raises(Fault, match="0 of 4 elements are stored"):
        torch_dist.some_rows(stored, NAME, [10])
