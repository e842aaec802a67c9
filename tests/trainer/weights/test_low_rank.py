"""trainer/weights/low_rank.py: blocks of a merged weight beside the whole of it, and what counts as merged."""

import pytest
import torch

from trainer.weights import low_rank

SHAPES = [(768, 2048), (2048, 768), (151, 2048), (1000, 333), (300, 12288), (1, 64), (64, 1), (4096, 640)]


def factors(shape: tuple[int, int], rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A released weight, A and B."""
    drawn = torch.Generator().manual_seed(rank)
    weight = 0.02 * torch.randn(shape, generator=drawn)
    return weight, torch.randn(rank, shape[1], generator=drawn) / 50, torch.randn(shape[0], rank, generator=drawn) / 50


@pytest.mark.parametrize("rank", [1, 8, 64, 384])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_the_whole_weight_to_the_last_bit(monkeypatch, shape, rank, dtype):
    """Also where many blocks are one weight, and rows of the last one are few. Of blocks of two rows it is not so."""
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**15)
    weight, a, b = factors(shape, rank)
    weight = weight.to(dtype)
    before = weight.clone()
    found = torch.cat([block.clone() for block in low_rank.merged(weight, a, b, 1.7, None)])
    assert torch.equal(found, (weight.float() + 1.7 * (b @ a)).to(dtype)) and found.dtype == dtype
    assert torch.equal(weight, before)  # it lies in the release's file
    assert low_rank.is_merged(found, weight, a, b, 1.7, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_have_the_magnitudes_of_their_rows(monkeypatch, shape):
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**15)
    weight, a, b = factors(shape, 8)
    magnitude = 1 + torch.rand(shape[0], generator=torch.Generator().manual_seed(1))
    found = torch.cat([block.clone() for block in low_rank.merged(weight.bfloat16(), a, b, 2.0, magnitude)])
    whole = weight.bfloat16().float() + 2.0 * (b @ a)
    assert torch.allclose(found.float(), magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True), rtol=2**-8)
    assert low_rank.is_merged(found, weight.bfloat16(), a, b, 2.0, magnitude)


@pytest.mark.parametrize("row, column", [(0, 0), (700, 2047), (767, 1)])
def test_one_number_that_is_off_is_seen_in_any_block(monkeypatch, row, column):
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**17)
    weight, a, b = factors((768, 2048), 8)
    found = torch.cat([block.clone() for block in low_rank.merged(weight.bfloat16(), a, b, 2.0, None)])
    found[row, column] *= 1 + 2**-5
    assert not low_rank.is_merged(found, weight.bfloat16(), a, b, 2.0, None)
    found[row, column] = float("nan")
    assert not low_rank.is_merged(found, weight.bfloat16(), a, b, 2.0, None)
