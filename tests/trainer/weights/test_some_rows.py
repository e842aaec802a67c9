"""Rows of a stored weight are read by themselves, wherever they lie in its pieces."""

from dataclasses import replace
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
from trainer.weights import digests, torch_dist
from trainer.weights.torch_dist import Place, Stored

NAME = "embedding.word_embeddings.weight"
WHOLE = torch.arange(40.0).view(10, 4)


@pytest.fixture
def pieces() -> list[MetadataIndex]:
    """Those that were asked for."""
    return []


def box(whole: torch.Tensor, offsets, sizes) -> torch.Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]


@pytest.fixture
def stored(pieces) -> Stored:
    rows = {0: 3, 3: 4, 7: 3}
    chunks = [ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, 4))) for first, count in rows.items()]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), WHOLE.shape, chunks)
    places = {MetadataIndex(NAME, one.offsets): _StorageInfo(torch_dist.RELEASED, 0, 0) for one in chunks}
    place = Place(NAME, NAME, (), tuple(WHOLE.shape), torch.float32, tuple(chunks))

    def make(index: MetadataIndex, offsets, sizes) -> torch.Tensor:
        pieces.append(index)
        first = index.offset[0] if index.offset else 0
        assert offsets[0] + sizes[0] <= rows[first]
        return box(WHOLE[first:], offsets, sizes)

    return Stored(Path("base"), Metadata({NAME: tensor}, storage_data=places), {NAME: place}, make=make)


@pytest.mark.parametrize("rows", [[0], [9, 0, 3], list(range(10)), [4, 4]])
def test_rows_are_those_of_the_weight(rows, stored):
    assert torch.equal(torch_dist.some_rows(stored, NAME, rows), torch_dist.read(stored, stored.places[NAME])[rows])


def test_pieces_without_one_of_them_are_left_alone(stored, pieces):
    torch_dist.some_rows(stored, NAME, [8, 9])
    assert {index.offset for index in pieces} == {torch.Size((7, 0))}


def test_a_row_that_is_not_stored_is_told(stored):
    with pytest.raises(Fault, match="0 of its 4 elements are stored"):
        torch_dist.some_rows(stored, NAME, [10])


def test_blocks_of_rows_are_the_pieces_in_their_order(stored):
    backwards = replace(stored.places[NAME], chunks=stored.places[NAME].chunks[::-1])
    blocks = torch_dist.rows(stored, backwards)
    assert [len(block) for block in blocks] == [3, 4, 3]
    assert torch.equal(torch.cat(blocks), WHOLE) and stored.seen == {NAME}


@pytest.mark.parametrize("lost", range(3))
def test_a_piece_that_is_not_stored_is_told(lost, stored):
    chunks = [chunk for number, chunk in enumerate(stored.places[NAME].chunks) if number != lost]
    with pytest.raises(Fault, match="of its 40 elements are stored"):
        torch_dist.rows(stored, replace(stored.places[NAME], chunks=tuple(chunks)))


def test_blocks_are_held_together_against_the_digest_of_the_whole(stored):
    right = replace(stored, in_memory={"digests": {NAME: digests.digest(WHOLE)}})
    assert len(torch_dist.rows(right, right.places[NAME])) == 3
    wrong = replace(stored, in_memory={"digests": {NAME: digests.digest(WHOLE.flip(0))}})
    with pytest.raises(Fault, match="is not the tensor that training had in memory"):
        torch_dist.rows(wrong, wrong.places[NAME])


def test_what_is_cut_by_columns_comes_whole(stored):
    columns = [ChunkStorageMetadata(torch.Size((0, first)), torch.Size((10, 2))) for first in (0, 2)]
    places = {MetadataIndex(NAME, one.offsets): _StorageInfo(torch_dist.RELEASED, 0, 0) for one in columns}
    cut = replace(
        stored,
        metadata=replace(stored.metadata, storage_data=places),
        make=lambda index, offsets, sizes: box(WHOLE[:, index.offset[1] :], offsets, sizes),
    )
    (whole,) = torch_dist.rows(cut, replace(stored.places[NAME], chunks=tuple(columns)))
    assert torch.equal(whole, WHOLE)
