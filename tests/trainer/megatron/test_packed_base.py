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
from trainer.megatron.packed_base import drawn
from trainer.megatron.packed_base.weight import PackedWeight, Store, attach, layers
from trainer.patches.checkpoints import base_loading
from trainer.startup.cpu.cuda import DeviceMode
from trainer.weights.quantised import pack, unpack

ROOT = Path(__file__).parents[3]
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
        assert torch.equal(kernel.unpack(*given), codes.unpack(*given)), given
    for shape, block in (((2, 20, 160), (1, 32)), ((1, 20, 44), (1, 8)), ((1, 3, 1028), (1, 32))):
        bytes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        scales = torch.rand((*shape[:2], -(-2 * shape[2] // block[1])), generator=random).bfloat16()
        given = bytes, scales, block, dtype
        assert torch.equal(kernel.unpack(*given), codes.unpack(*given)), given
"""


def packed(form: str, weights: torch.Tensor, dtype: torch.dtype) -> tuple[Store, list[torch.Tensor]]:
    """A store of these weights, and what they are by the code that reads releases."""
    scheme, kind = WAYS[form]
    described = Packed(scheme, tuple(weights.shape[1:]), "", "")
    found = [pack.pack(described, one, kind) for one in weights]
    whole = [unpack.unpack(described, of_codes, scales, dtype) for of_codes, scales in found]
    stacked = torch.stack([of_codes for of_codes, _ in found])
    stacked = stacked.view(torch.uint8) if form == "int4" else stacked
    return Store(stacked, torch.stack([scales for _, scales in found]).to(kind), scheme.block, dtype), whole


@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_the_formats_own_code(form, dtype):
    weights = torch.randn((3, 200, 328), generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 328)
    weights[0, 130] = 0
    store, expected = packed(form, weights, dtype)
    assert all(torch.equal(one, other) for one, other in zip(store.unpack(), expected, strict=True))
    held = 200 * 328 * 3 * {"fp8": 1.0, "int4": 0.5}[form]
    assert held < store.bytes < held * {"fp8": 1.01, "int4": 1.14}[form]


def test_the_kernel_gives_the_same_numbers():
    """Under Triton's interpreter; benchmarks/gpu/packed.py compares what its compiler makes of it, in bf16 too."""
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], cwd=ROOT, env={"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_path_that_would_keep_weights_unpacked_is_refused(monkeypatch):
    monkeypatch.setenv(base_loading.FUSED, "1")
    with pytest.raises(Fault, match=r"_GEMM: 1, but experts' products so keep weights unpacked"):
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
        store = drawn.store(FORMATS[form], 3, (256, 384), torch.bfloat16)
    assert store.bytes == 3 * 256 * 384 * FORMATS[form].bytes
    numbers = torch.stack(store.unpack()).float()
    assert numbers.isfinite().all() and 0.01 < numbers.std() < 0.04
