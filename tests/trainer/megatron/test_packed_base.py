"""trainer/megatron/packed_base: the numbers of the formats' own code to the last bit, and weights that only unpack."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.model_files.quantization import Packed, Scheme
from conf.rules.packed_base import FORMATS
from contract.faults import Fault
from tests.support import e2m1 as by_definition
from trainer.megatron.packed_base import drawn
from trainer.megatron.packed_base.weight import PackedWeight, Store, attach, layers
from trainer.patches.checkpoints import base_loading
from trainer.startup.cpu.cuda import DeviceMode
from trainer.weights.quantised import e2m1, pack, unpack

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
WAYS = {
    "fp8": (Scheme("fp8", "", "", (128, 128)), torch.float32),
    "int4": (Scheme("int", "", "", (1, 32), 4), torch.bfloat16),
}
KERNEL = """
import torch
from trainer.megatron.packed_base import codes, kernel

random = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float16):  # the interpreter cuts numbers off for bf16, where a GPU rounds them
    for shape, block in (((2, 136, 320), (128, 128)), ((1, 20, 72), (16, 8)), ((1, 3, 2056), (2, 128))):
        bytes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        bytes[(bytes & 127) == 127] = 3
        scales = torch.rand((shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1])), generator=random)
        given = bytes.view(codes.FP8), scales, block, dtype
        assert torch.equal(kernel.unpack(codes.Codes(*given)), codes.unpack(codes.Codes(*given))), given
    for shape, block in (((2, 20, 160), (1, 32)), ((1, 20, 44), (1, 8)), ((1, 3, 1028), (1, 32))):
        bytes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        scales = torch.rand((*shape[:2], -(-2 * shape[2] // block[1])), generator=random)
        factors = torch.rand((shape[0], 2 if shape[1] % 2 == 0 else 1), generator=random)
        exponents = torch.randint(110, 130, scales.shape, generator=random, dtype=torch.uint8)
        for more in ((scales.bfloat16(),), (scales.to(codes.FP8), factors), (exponents,)):
            given = bytes, more[0], block, dtype, *more[1:]
            assert torch.equal(kernel.unpack(codes.Codes(*given)), codes.unpack(codes.Codes(*given))), given
"""


def packed(form: str, weights: torch.Tensor, dtype: torch.dtype) -> tuple[Store, list[torch.Tensor]]:
    """A store of these weights, and what they are by the code that reads releases, or by their definition."""
    if form not in WAYS:
        found = [getattr(e2m1, form)(one) for one in weights]
        codes, scales, *factors = (torch.stack(parts) for parts in zip(*found, strict=True))
        whole = [by_definition.weight(*one).to(dtype) for one in found]
        return Store(codes, scales, FORMATS[form].block, dtype, factors[0].view(-1, 1) if factors else None), whole
    scheme, kind = WAYS[form]
    described = Packed(scheme, tuple(weights.shape[1:]), "", "")
    found = [pack.pack(described, one, kind) for one in weights]
    whole = [unpack.unpack(described, of_codes, scales, dtype) for of_codes, scales in found]
    stacked = torch.stack([of_codes for of_codes, _ in found])
    stacked = stacked.view(torch.uint8) if form == "int4" else stacked
    return Store(stacked, torch.stack([scales for _, scales in found]).to(kind), scheme.block, dtype), whole


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_the_formats_own_code(form, dtype):
    weights = torch.randn((3, 200, 328), generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 328)
    weights[0, 130] = 0
    store, expected = packed(form, weights, dtype)
    assert all(torch.equal(one, other) for one, other in zip(store.unpack(), expected, strict=True))
    held = 200 * 328 * 3 * FORMATS[form].bits / 8
    assert held < store.bytes < held * {"fp8": 1.01, "mxfp4": 1.08}.get(form, 1.14)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_nvfp4_is_modelopts_to_the_last_bit():
    """Codes, scales and factor, and what they stand for; and the codes are compressed-tensors'."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    one = by_definition.weight(every, torch.full((16, 1), 127, dtype=torch.uint8))
    assert torch.equal(one, unpack_fp4_from_uint8(every, 16, 32, torch.float32))
    random = torch.Generator().manual_seed(0)
    spread = torch.randn((200, 320), generator=random) * torch.logspace(-8, 2, 320)
    middles = torch.arange(-24, 24).repeat(20).view(60, 16) / 4 * 0.25  # up to 6: many lie between two codes
    for weight in (spread, torch.randn((200, 320), generator=random).bfloat16().float(), middles, spread * 0 + 1):
        theirs, scales, factor = NVFP4QTensor.quantize(weight.clone(), 16)
        mine = e2m1.nvfp4(weight)
        assert torch.equal(mine[2], factor) and torch.equal(mine[1].float(), scales.float())
        assert torch.equal(mine[0], theirs._quantized_data)
        store = Store(mine[0][None], mine[1][None], (1, 16), torch.bfloat16, mine[2].view(1, 1))
        given = dict(scale=scales, double_scale=factor, block_sizes={-1: 16})
        assert torch.equal(store.unpack()[0], theirs.dequantize(torch.bfloat16, **given))


def test_mxfp4_as_released_keeps_every_number():
    """Whatever scale a group was released with, the one that is found here has the same numbers on its codes."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (400, 64), generator=draw, dtype=torch.uint8)
    codes[::2] &= 0b10111011  # groups whose largest code is 1.5
    codes[::5] &= 0b10011001  # and those of 0.5
    codes[7, :16] = 0
    exponents = torch.randint(100, 140, (400, 4), generator=draw, dtype=torch.uint8)
    released = by_definition.weight(codes, exponents).bfloat16()
    again = e2m1.mxfp4(released)
    store = Store(again[0][None], again[1][None], (1, 32), torch.bfloat16)
    assert torch.equal(store.unpack()[0], released)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_zeros_and_short_groups_have_numbers_too(form):
    weight = torch.zeros(3, 40)
    weight[1, 39] = 0.3
    store, _ = packed(form, weight[None], torch.float32)
    assert torch.equal(store.unpack()[0] == 0, weight == 0)
    assert store.unpack()[0][1, 39] == pytest.approx(0.3, rel=0.2)


def test_the_kernel_gives_the_same_numbers():
    """Under Triton's interpreter; benchmarks/gpu/packed.py compares what its compiler makes of it, in bf16 too."""
    done = subprocess.run([sys.executable, "-c", KERNEL], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_path_that_would_keep_weights_unpacked_is_refused(monkeypatch):
    monkeypatch.setenv(base_loading.FUSED, "1")
    with pytest.raises(Fault, match=r"_GEMM: 1 keeps experts' weights unpacked"):
        base_loading.build_without_memory()


def test_a_packed_weight_looks_like_a_real_one_and_can_only_be_unpacked():
    layer = nn.Linear(328, 200, bias=False, device="meta", dtype=torch.bfloat16)
    layer.weight.partition_dim = 0
    store, (expected,) = packed("int4", torch.randn(1, 200, 328), torch.bfloat16)
    ((name, found, names),) = layers(nn.ModuleDict({"proj": layer}))
    assert (name, found, names) == ("proj", layer, ["weight"])
    attach(layer, names, store)
    weight = layer.weight
    assert isinstance(weight, PackedWeight) and isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert (weight.shape, weight.dtype, weight.device) == (expected.shape, torch.bfloat16, expected.device)
    assert weight.partition_dim == 0 and weight.packed_bytes == store.bytes
    assert torch.equal(weight.materialize_group_for_backward()[0], expected)
    assert layer.bfloat16().weight is weight and layer.to("cpu").weight is weight
    assert isinstance(layer.state_dict()["weight"], PackedWeight)
    for forbidden in (lambda: weight + 1, weight.norm, weight.clone, lambda: nn.functional.linear(expected, weight)):
        with pytest.raises(NotImplementedError, match="of a packed weight, which can only be unpacked"):
            forbidden()


@pytest.mark.parametrize("form", FORMATS)
def test_drawn_codes_are_weights_of_the_usual_size_in_as_many_bytes_as_are_planned(form):
    with DeviceMode():
        store = drawn.store(FORMATS[form], 3, (256, 384), torch.bfloat16, 2)
    assert store.bytes == 3 * 256 * 384 * FORMATS[form].bytes + 3 * 2 * FORMATS[form].factor_bytes
    numbers = store.unpack().float()
    assert numbers.isfinite().all() and 0.01 < numbers.std() < 0.04
