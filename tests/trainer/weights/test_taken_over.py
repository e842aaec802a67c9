"""trainer/weights/quantised/taken_over.py: released codes come back byte for byte, or not at all."""

import pytest
import torch

from conf.model_files.quantization import Packed, Scheme
from conf.rules.packed_base import FORMATS
from trainer.weights.quantised import unpack
from trainer.weights.quantised.taken_over import Scales, codes

EVERY_CODE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def drawn(form: str, rows: int, columns: int) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    """Every code, with scales from 1e-12 to 1e12."""
    random = torch.Generator().manual_seed(0)
    height, width = FORMATS[form].block
    shape = (-(-rows // height), -(-columns // width))
    scales = 10 ** (24 * torch.rand(shape, generator=random) - 12)
    if form == "fp8":
        numbers = EVERY_CODE[torch.randint(0, len(EVERY_CODE), (rows, columns), generator=random)]
        return Packed(Scheme("fp8", "", "", (128, 128)), (rows, columns), "", ""), numbers, scales
    numbers = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    return Packed(Scheme("int", "", "", (1, 32), 4), (rows, columns), "", ""), numbers, scales.bfloat16()


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_come_back_byte_for_byte_from_what_they_stand_for(form, dtype):
    packed, numbers, scales = drawn(form, 300, 320)
    given = numbers.view(torch.float8_e4m3fn if form == "fp8" else torch.int32)
    whole = unpack.unpack(packed, given, scales, dtype)
    source = torch.arange(300) // packed.scheme.block[0]
    released = Scales(scales.float()[source], source, dtype)
    for top, bottom, left, right, block in ((0, 300, 0, 320, packed.scheme.block), (64, 128, 48, 64, (64, 16))):
        block = (min(block[0], packed.scheme.block[0]), min(block[1], packed.scheme.block[1]))
        found = codes(FORMATS[form], released, whole[top:bottom, left:right], (top, left), block)
        assert found
        each = 1 if form == "fp8" else 2
        assert torch.equal(found[0].view(torch.uint8), numbers[top:bottom, left // each : right // each])
        assert found[1].dtype == scales.dtype
        rows, columns = torch.arange(top, bottom, block[0]), torch.arange(left, right, block[1])
        expected = scales[rows // packed.scheme.block[0]][:, columns // packed.scheme.block[1]]
        assert torch.equal(found[1], expected)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_numbers_that_are_not_the_release_s_are_not_taken_for_it(form):
    packed, numbers, scales = drawn(form, 128, 128)
    whole = unpack.unpack(
        packed, numbers.view(torch.float8_e4m3fn if form == "fp8" else torch.int32), scales, torch.float32
    )
    source = torch.arange(128) // packed.scheme.block[0]
    released = Scales(scales.float()[source], source, torch.float32)
    assert codes(FORMATS[form], released, whole, (0, 0), packed.scheme.block)
    whole[5, 7] *= 1.01
    whole[5, 7] += 1e-13
    assert codes(FORMATS[form], released, whole, (0, 0), packed.scheme.block) is None
    released = Scales(scales.float()[source] * 1.01, source, torch.float32)
    assert codes(FORMATS[form], released, whole, (0, 0), packed.scheme.block) is None


def test_rows_in_another_order_have_lower_blocks():
    def height(source: torch.Tensor, matrices: int, most: int) -> int:
        return Scales(torch.empty(0), source, torch.float32).height(matrices, most)

    whole, ragged = torch.arange(300) // 128, torch.arange(192) // 128
    assert height(whole, 1, 128) == 128
    assert height(torch.cat([ragged, 2 + ragged]), 2, 128) == 128
    assert height(torch.tensor([0] * 128 + [2] * 64 + [3] * 64 + [1] * 128), 1, 128) == 64
    assert height(torch.arange(64), 1, 1) == 1
