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
    found = torch.cat([block.clone() for block in low_rank.Change(a, b, 1.7, None).blocks(weight)])
    assert torch.equal(found, (weight.float() + 1.7 * (b @ a)).to(dtype)) and found.dtype == dtype
    assert torch.equal(weight, before)  # it lies in the release's file
    assert low_rank.Change(a, b, 1.7, None).is_in(found, weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_have_the_magnitudes_of_their_rows(monkeypatch, shape):
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**15)
    weight, a, b = factors(shape, 8)
    magnitude = 1 + torch.rand(shape[0], generator=torch.Generator().manual_seed(1))
    found = torch.cat([block.clone() for block in low_rank.Change(a, b, 2.0, magnitude).blocks(weight.bfloat16())])
    whole = weight.bfloat16().float() + 2.0 * (b @ a)
    assert torch.allclose(found.float(), magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True), rtol=2**-8)
    assert low_rank.Change(a, b, 2.0, magnitude).is_in(found, weight.bfloat16())


@pytest.mark.parametrize("row, column", [(0, 0), (700, 2047), (767, 1)])
def test_one_number_that_is_off_is_seen_in_any_block(monkeypatch, row, column):
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**17)
    weight, a, b = factors((768, 2048), 8)
    found = torch.cat([block.clone() for block in low_rank.Change(a, b, 2.0, None).blocks(weight.bfloat16())])
    found[row, column] *= 1 + 2**-5
    assert not low_rank.Change(a, b, 2.0, None).is_in(found, weight.bfloat16())
    found[row, column] = float("nan")
    assert not low_rank.Change(a, b, 2.0, None).is_in(found, weight.bfloat16())


TYPES = [torch.bfloat16, torch.float16, torch.float32]


class Drawn:
    """A weight, its factors and a magnitude, of a shape and with a scale that the number gives."""

    def __init__(self, number: int, dtype: torch.dtype, dora: bool):
        drawn = torch.Generator().manual_seed(number)
        rows, columns = (int(torch.randint(1, 400, (), generator=drawn)) for _ in range(2))
        rank = int(torch.randint(1, 65, (), generator=drawn))
        self.weight = (0.02 * torch.randn(rows, columns, generator=drawn)).to(dtype)
        self.a = torch.randn(rank, columns, generator=drawn)
        self.b = 0.02 * torch.randn(rows, rank, generator=drawn) / rank**0.5
        self.scale = float(torch.rand((), generator=drawn)) + 0.5
        self.magnitude = 1 + torch.rand(rows, generator=drawn) if dora else None

    def whole(self) -> torch.Tensor:
        blocks = low_rank.Change(self.a, self.b, self.scale, self.magnitude).blocks(self.weight)
        return torch.cat([block.clone() for block in blocks])

    def holds(self, found: torch.Tensor, **other) -> bool:
        """Whether it is merged."""
        asked = {"scale": self.scale, "magnitude": self.magnitude} | other
        return low_rank.Change(self.a, self.b, **asked).is_in(found, self.weight)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(low_rank, "AT_ONCE", 2**14)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_merged_is_never_refused(small_blocks, dtype, dora):
    for number in range(60):
        drawn = Drawn(number, dtype, dora)
        assert drawn.holds(drawn.whole()), number


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_each_fault_is_refused_wherever_it_is(small_blocks, dtype, dora):
    for number in range(40):
        drawn = Drawn(number, dtype, dora)
        merged = drawn.whole()
        chosen = torch.Generator().manual_seed(number)
        # Of a number near 0, two steps are less than what fp32 loses of the largest.
        large = (merged.abs() >= merged.abs().max() / 16).nonzero()
        row, column = large[int(torch.randint(len(large), (), generator=chosen))].tolist()
        for fault in ("two steps up", "two steps down", "nan", "inf", "-inf", "sign", "zero", "row of another"):
            found = merged.clone()
            if fault.startswith("two steps"):
                found[row, column] = two_steps(merged, row, column, fault == "two steps up")
            elif fault == "sign":
                found[row, column] *= -1
            elif fault == "zero":
                found[max(0, row - 3) : row + 1] = 0
            elif fault == "row of another":
                found[row] = merged.roll(1, 0)[row] if len(merged) > 1 else -merged[row]
            else:
                found[row, column] = float(fault)
            assert not drawn.holds(found), f"{number}: {fault} at {row}, {column} of {tuple(found.shape)}"
        if dora:
            assert drawn.magnitude is not None
            assert not drawn.holds(merged, magnitude=drawn.magnitude * 1.05), f"{number}: other magnitudes"
        if not dora or merged.shape[1] > 1:  # else the norm takes it away again
            assert not drawn.holds(merged, scale=drawn.scale * 1.5), f"{number}: another scale"


def two_steps(merged: torch.Tensor, row: int, column: int, up: bool) -> torch.Tensor:
    """Number that is two steps of its type away; in fp32, of which another order loses more, 2e-5 of the largest."""
    number = merged[row, column].clone()
    if merged.dtype == torch.float32:
        return number + (2 if up else -2) * 1e-5 * merged.abs().max()
    towards = torch.tensor(float("inf") if up else -float("inf"), dtype=number.dtype)
    return torch.nextafter(torch.nextafter(number, towards), towards)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 1e-3, 1e-5])
def test_no_order_of_adding_up_is_refused_however_small_numbers_are(small_blocks, dtype, size, dora):
    """fp16 has the same distance between all numbers near 0, where rounding is off by more than a part of them."""
    for number in range(30):
        drawn = Drawn(number, dtype, dora)
        drawn.weight *= size
        drawn.b *= size
        exact = drawn.weight.double() + drawn.scale * (drawn.b.double() @ drawn.a.double())
        if drawn.magnitude is not None:
            drawn.magnitude *= size
            exact *= (drawn.magnitude / exact.norm(dim=1))[:, None]
        assert drawn.holds(exact.to(dtype)), number


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_infinite_is_refused_where_it_is_expected_as_well(small_blocks, dtype):
    drawn = Drawn(1, dtype, False)
    drawn.weight[0, 0] = float("inf")
    assert not drawn.holds(drawn.whole())
    drawn.weight[0, 0] = float("nan")
    assert not drawn.holds(drawn.whole())


def test_numbers_that_outgrow_their_type_are_refused(small_blocks):
    drawn = Drawn(1, torch.float16, False)
    drawn.scale = 1e8
    found = drawn.whole()
    assert bool(found.isinf().any()) and not drawn.holds(found)


def test_zeros_of_either_sign_are_the_same(small_blocks):
    drawn = Drawn(1, torch.bfloat16, False)
    drawn.weight.zero_()
    drawn.b.zero_()
    assert drawn.holds(drawn.whole()) and drawn.holds(-drawn.whole())
