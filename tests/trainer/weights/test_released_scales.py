"""trainer/weights/packed_base/released_scales.py: released codes come back byte for byte, or not at all."""

import pytest
import torch
from safetensors.torch import save_file

from conf.model_files.quantization import E2M1, Packed, Scheme
from conf.rules.packed_base import FORMATS
from tests.support import e2m1
from trainer.weights import released
from trainer.weights.packed_base import released_scales
from trainer.weights.packed_base.released_scales import Scales
from trainer.weights.quantised import unpack

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
    if form == "mxfp4":
        exponents = torch.randint(2, 250, shape, generator=random, dtype=torch.uint8)
        return Packed(Scheme("mxfp4", "", "", bits=4), (rows, columns), "", ""), numbers, exponents
    if form == "nvfp4":
        of_groups = torch.randint(1, 0x7F, shape, generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return Packed(Scheme("nvfp4", "", "", (1, 16), 4), (rows, columns), "", ""), numbers, of_groups
    return Packed(Scheme("int", "", "", (1, 32), 4), (rows, columns), "", ""), numbers, scales.bfloat16()


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_come_back_byte_for_byte_from_what_they_stand_for(form, dtype):
    packed, numbers, scales = drawn(form, 300, 320)
    given = numbers.view(torch.float8_e4m3fn if form == "fp8" else torch.int32)
    whole = unpack.unpack(packed, given, scales, dtype)
    source = torch.arange(300) // packed.scheme.block[0]
    released = Scales(scales[source], source, dtype)
    for top, bottom, left, right, block in ((0, 300, 0, 320, packed.scheme.block), (64, 128, 48, 64, (64, 16))):
        block = (min(block[0], packed.scheme.block[0]), min(block[1], packed.scheme.block[1]))
        found = released.codes(FORMATS[form], whole[top:bottom, left:right], (top, left), block)
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
    assert released.codes(FORMATS[form], whole, (0, 0), packed.scheme.block)
    whole[5, 7] *= 1.01
    whole[5, 7] += 1e-13
    assert released.codes(FORMATS[form], whole, (0, 0), packed.scheme.block) is None
    released = Scales(scales.float()[source] * 1.01, source, torch.float32)
    assert released.codes(FORMATS[form], whole, (0, 0), packed.scheme.block) is None


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_of_e2m1_come_back_byte_for_byte_with_the_signs_of_zeros(form, dtype):
    _, numbers, scales = drawn(form, 128, 320)
    factor = torch.tensor(1.7e-4) if form == "nvfp4" else None
    whole = e2m1.weight(numbers, scales, factor).to(dtype)
    released = Scales(scales, torch.arange(128), dtype)
    found = released.codes(FORMATS[form], whole[32:96, 64:128], (32, 64), (1, 16), factor)
    assert found and torch.equal(found[0], numbers[32:96, 32:64])
    columns = torch.arange(64, 128, 16) // FORMATS[form].block[1]
    assert torch.equal(found[1].view(torch.uint8), scales.view(torch.uint8)[32:96][:, columns])
    whole[40, 70] = whole[40, 70] * 1.02 + 1e-3 * whole.abs().amax()
    assert released.codes(FORMATS[form], whole[32:96, 64:128], (32, 64), (1, 16), factor) is None


def test_a_matrix_of_several_factors_has_none():
    two = torch.tensor([0.5] * 4 + [0.25] * 4)
    assert Scales(torch.empty(0), torch.arange(8), torch.float32, two).factor(0, 1) is None
    assert Scales(torch.empty(0), torch.arange(8), torch.float32, two).factor(1, 2) == 0.25


@pytest.mark.parametrize("seed", range(8))
def test_scales_over_a_number_are_taken_over_as_scales_times_one(seed, tmp_path):
    """compressed-tensors divides by its factor, and a packed base multiplies: the weights in bf16 are the same bits."""
    factor = 2.0 ** (20 * torch.rand((1,), generator=torch.Generator().manual_seed(seed)))
    save_file({"x.weight_global_scale": factor}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model = released.read(tmp_path)
    scheme = Scheme("nvfp4", "", "", (1, 16), 4, factor=".weight_global_scale", divides=True)
    found = released_scales._factor(model, Packed(scheme, (1, 16), "", "", factor="x.weight_global_scale"))
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    numbers = torch.tensor(E2M1)
    assert torch.equal((numbers * (scales * found)).bfloat16(), (numbers * (scales / factor)).bfloat16())
    assert found == pytest.approx(float(1 / factor), rel=1e-6)


def test_rows_in_another_order_have_lower_blocks():
    def height(source: torch.Tensor, matrices: int, most: int) -> int:
        return Scales(torch.empty(0), source, torch.float32).height(matrices, most)

    whole, ragged = torch.arange(300) // 128, torch.arange(192) // 128
    assert height(whole, 1, 128) == 128
    assert height(torch.cat([ragged, 2 + ragged]), 2, 128) == 128
    assert height(torch.tensor([0] * 128 + [2] * 64 + [3] * 64 + [1] * 128), 1, 128) == 64
    assert height(torch.arange(64), 1, 1) == 1
