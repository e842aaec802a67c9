"""The pieces of a stored tensor are proven to be all of it, as torch proves it, and in no time."""

import dataclasses
import itertools
import logging
import random
import time

import pytest
import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from trainer.weights.conversion.tiling import is_tiled


def _piece(offsets, sizes) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _experts(layers: int, experts: int, rows: int, cut: int) -> list[ChunkStorageMetadata]:
    places = itertools.product(range(layers), range(experts), range(0, rows, rows // cut))
    return [_piece((layer, expert, row, 0), (1, 1, rows // cut, 8)) for layer, expert, row in places]


def _as_torch_says(size, pieces) -> bool:
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(size), pieces)
    plans = [SavePlan([]), SavePlan([])]  # of one alone torch does not ask whether it is all
    return default_planner._validate_global_plan(plans, Metadata({"one": stored}))


def test_all_experts_of_all_layers_are_a_tensor():
    assert is_tiled((3, 4, 6, 8), _experts(3, 4, 6, 2))
    assert is_tiled((), [_piece((), ())])


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": torch.Size((0, 1, 0, 0))},  # another's place
        {"offsets": torch.Size((3, 0, 0, 0))},  # outside
        {"offsets": torch.Size((0, 0, -1, 0))},
        {"sizes": torch.Size((1, 1, 2, 8))},  # a row is lacking
        {"sizes": torch.Size((1, 2, 3, 4))},  # as much of it, and half is the next one's
    ],
)
def test_a_piece_too_many_too_few_or_elsewhere_is_seen(change):
    pieces = _experts(3, 4, 6, 2)
    pieces[0] = dataclasses.replace(pieces[0], **change)
    assert not is_tiled((3, 4, 6, 8), pieces)
    assert not is_tiled((3, 4, 6, 8), _experts(3, 4, 6, 2)[1:])
    assert not is_tiled((3, 4, 6, 8), [*_experts(3, 4, 6, 2), _experts(3, 4, 6, 2)[0]])


def test_torch_says_the_same_of_pieces_at_random(caplog):
    caplog.set_level(logging.CRITICAL)  # torch tells of each pair
    draw, found = random.Random(0), set()
    for _ in range(3000):
        size = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        cuts = [sorted({0, length, *draw.choices(range(length + 1), k=draw.randint(0, 2))}) for length in size]
        spans = [list(itertools.pairwise(cut)) for cut in cuts]
        boxes = [list(box) for box in itertools.product(*spans)]
        if draw.random() < 0.6:  # one is moved, longer, lost or there twice
            box, dim = draw.randrange(len(boxes)), draw.randrange(len(size))
            first, last = boxes[box][dim]
            ways = [[(first + 1, last + 1)], [(first, last + 1)], [(first - 1, last)], [], [(first, last)] * 2]
            changed = [[*boxes[box][:dim], span, *boxes[box][dim + 1 :]] for span in draw.choice(ways)]
            boxes[box : box + 1] = changed
        pieces = [_piece([f for f, _ in box], [last - f for f, last in box]) for box in boxes]
        expected = _as_torch_says(size, pieces)
        assert is_tiled(size, pieces) == expected, (size, pieces)
        found.add(expected)
    assert found == {True, False}


def test_a_tensor_of_many_experts_takes_no_time():
    pieces = _experts(58, 256, 16, 2)
    start = time.process_time()
    assert is_tiled((58, 256, 16, 8), pieces)
    assert time.process_time() - start < 5, "not every two pieces are held against one another"
