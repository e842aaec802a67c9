"""Quantised weights are what those make of them whose formats they are; what does not fit is named."""

import itertools
import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from conf.model_files import quantization
from conf.model_files.quantization import OF_TINY, Packed
from conf.rules import conversion
from conf.schema.export import Export
from contract.faults import Fault
from tests.support import e2m1 as by_definition
from trainer import convert
from trainer.rehearsal import tiny_models
from trainer.weights import released, released_tensors
from trainer.weights.quantised import pack, unpack

EVERY_CODE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{WEIGHT}_scale_inv"
INT4 = OF_TINY["int4"]
STEM = WEIGHT.removesuffix(".weight")
SCALES_OF_NVFP4, FACTOR = f"{STEM}.weight_scale", f"{STEM}.weight_global_scale"


def fp8(rows: int, columns: int, block: tuple[int, int], dtype: str = "bfloat16"):
    """A weight with every code in it, scales from the smallest to the largest, and what they stand for."""
    draw = torch.Generator().manual_seed(0)
    codes = EVERY_CODE[torch.randint(0, len(EVERY_CODE), (rows, columns), generator=draw)].view(torch.float8_e4m3fn)
    config = {"dtype": dtype, "quantization_config": OF_TINY["fp8"] | {"weight_block_size": list(block)}}
    packed = Packed(quantization.scheme(config), (rows, columns), WEIGHT, SCALES)
    scales = torch.exp2(torch.randn(unpack.grid(packed), generator=draw) * 8 - 12)
    return packed, codes, scales


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (384, 128), (1024, 640)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_fp8_are_what_transformers_makes_of_them(rows, columns, dtype, monkeypatch):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    monkeypatch.setattr(unpack, "AT_ONCE", 2**17)  # in several parts
    packed, codes, scales = fp8(rows, columns, (128, 128), dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, getattr(torch, dtype))
    assert torch.equal(unpack.unpack(packed, codes, scales, getattr(torch, dtype)), theirs)


@pytest.mark.parametrize(("rows", "columns"), [(576, 7168 // 8), (192, 130), (1, 1), (129, 127)])
def test_a_last_block_is_shorter_as_in_deepseek_s_own_code(rows, columns):
    """transformers raises an error there, or takes other blocks: of 192 rows, two of 96."""
    packed, codes, scales = fp8(rows, columns, (128, 128))
    expected = torch.empty(rows, columns, dtype=torch.bfloat16)
    for i, j in itertools.product(range(0, rows, 128), range(0, columns, 128)):
        expected[i : i + 128, j : j + 128] = codes[i : i + 128, j : j + 128].float() * scales[i // 128, j // 128]
    assert torch.equal(unpack.unpack(packed, codes, scales, torch.bfloat16), expected)
    part = unpack.unpack(packed, codes[rows // 3 :], scales, torch.bfloat16, rows // 3)
    assert torch.equal(part, expected[rows // 3 :])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what it imports
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["int4", "fp8-rows"])
def test_compressed_tensors_are_what_their_library_makes_of_them(form, kind):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    draw = torch.Generator().manual_seed(0)
    weight = torch.randn((96, 160), generator=draw)
    scheme = quantization.scheme({"quantization_config": OF_TINY[form]})
    packed = Packed(scheme, (96, 160), "codes", "scales")
    codes, scales = pack.pack(packed, weight)
    scales = scales.to(kind)
    group = OF_TINY[form]["config_groups"]["group_0"]
    state = {"weight_packed" if form == "int4" else "weight": codes, "weight_scale": scales}
    state["weight_shape"] = torch.tensor(weight.shape)
    library = BaseCompressor.get_value_from_registry(OF_TINY[form]["format"])
    theirs = library.decompress(state, QuantizationScheme(**group))["weight"].to(torch.bfloat16)
    mine = unpack.unpack(packed, codes, scales, torch.bfloat16)
    assert torch.equal(mine, theirs)
    assert float((mine - weight).norm() / weight.norm()) < (0.12 if form == "int4" else 0.03)


@pytest.mark.slow
def test_mxfp4_is_what_transformers_makes_of_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(1, 255, (3, 64, 4), generator=draw, dtype=torch.uint8)
    scheme = quantization.scheme({"quantization_config": {"quant_method": "mxfp4"}})
    found = unpack.unpack(Packed(scheme, (3, 128, 64), "x_blocks", "x_scales"), blocks, exponents, torch.bfloat16)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, exponents))
    assert found.shape == (3, 128, 64)


def nvfp4(form: str, folder) -> tuple[dict[str, torch.Tensor], released.Model]:
    """A release of one matrix with every code and every scale, but for those below a thousandth of the largest."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (96, 80), generator=draw, dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (96, 10), generator=draw, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scheme = quantization.scheme({"quantization_config": OF_TINY[form]})
    factor = torch.tensor([7351.3]) if scheme.divides else torch.tensor(1.36e-4)
    tensors = {scheme.codes: codes, scheme.scales: scales, scheme.factor: factor, ".input_scale": torch.tensor(1.0)}
    tensors = {WEIGHT.removesuffix(".weight") + name: tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": OF_TINY[form]}))
    return tensors, released.read(folder)


@pytest.mark.parametrize("form", ["nvfp4", "nvfp4-modelopt"])
def test_nvfp4_is_what_it_says_by_definition(form, tmp_path):
    tensors, model = nvfp4(form, tmp_path)
    codes, scales, factor, _ = tensors.values()
    in_fp32 = scales.float() / factor if form == "nvfp4" else scales.float() * factor
    expected = by_definition.numbers(codes) * in_fp32.repeat_interleave(16, 1)
    assert torch.equal(released_tensors.read(model, WEIGHT), expected.bfloat16())
    assert torch.equal(released_tensors.read(model, WEIGHT, slice(17, 40)), expected.bfloat16()[17:40])
    assert model.packed[WEIGHT].tensors == tuple(tensors) and not released.checksums(model, model.tensors)[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_nvfp4_is_what_the_libraries_make_of_it(tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    (tmp_path / "theirs").mkdir()
    tensors, model = nvfp4("nvfp4", tmp_path / "theirs")
    group = OF_TINY["nvfp4"]["config_groups"]["group_0"]
    library = BaseCompressor.get_value_from_registry(OF_TINY["nvfp4"]["format"])
    state = {name.removeprefix(WEIGHT.removesuffix("weight")): tensor for name, tensor in tensors.items()}
    theirs = library.decompress(state, QuantizationScheme(**group))["weight"].to(torch.bfloat16)
    assert torch.equal(released_tensors.read(model, WEIGHT), theirs)
    (tmp_path / "modelopt").mkdir()
    tensors, model = nvfp4("nvfp4-modelopt", tmp_path / "modelopt")
    codes, scales, factor, _ = tensors.values()
    theirs = NVFP4QTensor(torch.Size((96, 160)), torch.bfloat16, codes)
    theirs = theirs.dequantize(torch.bfloat16, scale=scales, double_scale=factor, block_sizes={-1: 16})
    assert torch.equal(released_tensors.read(model, WEIGHT), theirs)


@pytest.mark.parametrize("kind", ["llama-nvfp4", "llama-nvfp4-modelopt", "gpt-oss-mxfp4"])
def test_tiny_releases_in_4_bits_are_near_the_weights_that_they_are_made_of(kind, tmp_path):
    tiny_models.make_model(kind, tmp_path / "packed")
    tiny_models.make_model(quantization.of_tiny(kind)[0], tmp_path / "plain")
    packed, plain = (released.read(tmp_path / name) for name in ("packed", "plain"))
    assert packed.weights.keys() == plain.weights.keys() and packed.packed
    for name in packed.packed:
        found, expected = (released_tensors.read(model, name).float() for model in (packed, plain))
        assert 0.08 < float((found - expected).norm() / expected.norm()) < 0.13
    assert set(packed.packed) == {
        name for name in plain.weights if name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))
    } - ({name for name in plain.weights if "self_attn" in name} if "mxfp4" in kind else set())


def negative(tensors):
    tensors[SCALES_OF_NVFP4].view(torch.uint8)[3, 3] |= 0x80


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(FACTOR), f"scales missing (1): {FACTOR}"),
        (
            lambda tensors: tensors.update({FACTOR: torch.ones(2)}),
            f"{FACTOR} is F32 [2] but should be one number in F32",
        ),
        (lambda tensors: tensors.update({SCALES_OF_NVFP4: torch.ones(96, 10)}), f"{SCALES_OF_NVFP4} (F32)"),
        (lambda tensors: tensors.update({SCALES_OF_NVFP4: tensors[SCALES_OF_NVFP4][1:]}), "but should be [96, 10]"),
        (lambda tensors: tensors.pop(f"{STEM}.weight_packed"), "scales without a weight (3)"),
        (negative, f"or scales that are not above 0: {SCALES_OF_NVFP4}"),
        (lambda tensors: tensors.update({FACTOR: torch.tensor([0.0])}), f"or scales that are not above 0: {FACTOR}"),
    ],
)
def test_scales_of_nvfp4_that_are_missing_or_wrong_are_named(change, said, tmp_path):
    tensors, _ = nvfp4("nvfp4", tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Fault, match=re.escape(said)):
        model = released.read(tmp_path)
        raise released.not_finite(model, released.checksums(model, model.tensors)[1])


@pytest.fixture
def release(tmp_path):
    """release(change) -> a folder with one quantised weight and a norm."""

    def release(change=lambda tensors: None, config=None):
        _, codes, scales = fp8(96, 64, (32, 32))
        tensors = {WEIGHT: codes, SCALES: scales, "model.norm.weight": torch.ones(64)}
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        described = {"architectures": ["LlamaForCausalLM"], "quantization_config": OF_TINY["fp8"]}
        (tmp_path / "config.json").write_text(json.dumps(described if config is None else config))
        return tmp_path

    return release


def of_scales(change):
    def changed(tensors):
        tensors[SCALES] = change(tensors[SCALES])

    return changed


def with_number(value: float):
    def changed(scales):
        scales[1, 1] = value
        return scales

    return of_scales(changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(SCALES), f"scales missing (1): {SCALES}"),
        (lambda tensors: tensors.pop(WEIGHT), f"scales without a weight (1): {SCALES}"),
        (
            of_scales(lambda s: s.T.contiguous()),
            f"scales of the wrong shape (1): {SCALES} is [2, 3] but should be [3, 2]",
        ),
        (of_scales(lambda s: s.flatten()), f"{SCALES} is [6] but should be [3, 2]"),
        (of_scales(lambda s: s.int()), f"scales of an unsupported type (1): {SCALES} (I32)"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), f"scales without a weight (1): {SCALES}"),
        (lambda t: t.update({WEIGHT: t[WEIGHT][None]}), f"{WEIGHT} (F8_E4M3 [1, 96, 64])"),
        (
            lambda t: t.update({"k_scale": t[SCALES].to(torch.float8_e4m3fn)}),
            "FP8 tensors without a scale (1): k_scale",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(release, change, said):
    folder = release(change)
    with pytest.raises(Fault) as fault:
        released.read(folder)
    assert said in str(fault.value) and "\n" not in str(fault.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), -0.0])
def test_a_scale_that_is_no_scale_is_named(release, value):
    with pytest.raises(Fault, match=f"or scales that are not above 0: {SCALES}; download it again"):
        convert._checksums(released.read(release(with_number(value))), {})


def test_a_code_that_is_no_number_is_named(release):
    def nan(tensors):
        tensors[WEIGHT].view(torch.uint8)[5, 5] = 0xFF

    with pytest.raises(Fault, match=f"1 tensors hold numbers that are infinite or not a number: {WEIGHT};"):
        convert._checksums(released.read(release(nan)), {})


def test_fp8_without_a_description_is_refused(release):
    with pytest.raises(Fault, match=f"config.json has no quantization_config \\(1\\): {WEIGHT}"):
        released.read(release(config={}))


def test_a_weight_that_is_excluded_and_quantised_is_named(release):
    of_fp8 = OF_TINY["fp8"] | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"]}
    with pytest.raises(Fault, match=f"quantised, but excluded by quantization_config \\(1\\): {WEIGHT}"):
        released.read(release(config={"quantization_config": of_fp8}))


def test_a_shape_that_codes_contradict_is_named(tmp_path):
    scheme = quantization.scheme({"quantization_config": INT4})
    codes, scales = pack.pack(Packed(scheme, (64, 64), "", ""), torch.randn(64, 64))
    tensors = {"x.weight_packed": codes, "x.weight_scale": scales, "x.weight_shape": torch.tensor([64, 63])}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": INT4}))
    model = released.read(tmp_path)
    with pytest.raises(Fault, match=r"x.weight_shape is \[64, 63\], but its codes are \[64, 64\]"):
        released_tensors.read(model, "x.weight")


def group(**changed):
    weights = INT4["config_groups"]["group_0"]["weights"] | changed
    return INT4 | {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"quant_method": "awq"}, 'quant_method is "awq", but only fp8, compressed-tensors, mxfp4, modelopt are'),
        ({"quant_method": ["fp8"]}, "quant_method is"),
        ({"quant_method": "fp8"}, "weight_block_size is null, but FP8 weights need blocks"),
        (OF_TINY["fp8"] | {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        (OF_TINY["fp8"] | {"weight_block_size": [128]}, "weight_block_size is [128]"),
        (OF_TINY["fp8"] | {"fmt": "e5m2"}, 'fmt is "e5m2", but only "e4m3" or absent is supported'),
        (OF_TINY["fp8"] | {"activation_scheme": "static"}, 'activation_scheme is "static"'),
        (OF_TINY["fp8"] | {"modules_to_not_convert": "lm_head"}, "which is not a list of modules"),
        (INT4 | {"ignore": ["re:("]}, "which is not a pattern"),
        (INT4 | {"config_groups": {}}, "config_groups has 0 groups with weights"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (group(symmetric=False), "symmetric is false, but only true is supported"),
        (group(actorder="group"), 'actorder is "group", but only absent is supported'),
        (group(num_bits=3), 'pack-quantized" of 3 bits'),
        (group(strategy="tensor_group"), "supported are tensor, channel, block, group and tensor_group of 16"),
        (group(group_size=None), "supported are tensor, channel, block, group and tensor_group of 16"),
        (
            OF_TINY["nvfp4"] | {"format": "mxfp4-pack-quantized"},
            "but only FP8, INT4, nvfp4- and mxfp4-pack-quantized are supported",
        ),
        (OF_TINY["nvfp4-modelopt"] | {"quant_algo": "FP8"}, 'but only "NVFP4" or "W4A16_NVFP4" is supported'),
        (OF_TINY["nvfp4-modelopt"] | {"group_size": 32}, "group_size is 32, but only 16 or absent is supported"),
        (
            OF_TINY["nvfp4-modelopt"] | {"config_groups": {"group_0": {"weights": {"group_size": 32}}}},
            "config_groups.weights.group_size is 32; supported is 16",
        ),
        ("fp8", 'quantization_config is "fp8", which is not a section of keys'),
    ],
)
def test_formats_that_are_not_read_are_refused_in_a_line(described, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        quantization.scheme({"quantization_config": described})
    assert "\n" not in str(error.value)


AS_RELEASED = Export(quantization="as_released")


@pytest.mark.parametrize(("form", "said"), [("int4", "4 bits would undo the training"), ("", "is not quantised")])
def test_a_format_that_a_merged_model_cannot_have_is_refused_in_a_line(form, said):
    config = {"quantization_config": OF_TINY[form]} if form else {}
    assert said in conversion.unwritable(config, AS_RELEASED)
    assert conversion.unwritable(config, Export()) == ""
    assert conversion.unwritable({"quantization_config": OF_TINY["fp8"]}, AS_RELEASED) == ""


def trained(scheme_of: str, by: float):
    """A weight that was quantised by amax, and a change of so much of it."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn((256, 512), generator=draw) * 0.02
    packed = Packed(quantization.scheme({"quantization_config": OF_TINY[scheme_of]}), (256, 512), "codes", "scales")
    change = by * 0.02 * torch.randn((256, 4), generator=draw) @ torch.randn((4, 512), generator=draw) / 2
    return packed, *pack.pack(packed, weight), change


@pytest.mark.parametrize("form", ["fp8", "fp8-rows"])
def test_what_training_changed_by_little_survives_rounding(form):
    """To the nearest code, hardly any of it would."""
    packed, codes, scales, change = trained(form, by=0.005)
    new_codes, new_scales, loss = pack.change("a weight", packed, codes, scales, change)
    before = unpack.unpack(packed, codes, scales, torch.float32)
    assert loss.share == pytest.approx(1, abs=0.3)
    found = unpack.unpack(packed, new_codes, new_scales, torch.float32)
    assert float(((found - before) * change).sum() / change.square().sum()) == pytest.approx(loss.share, abs=0.05)
    assert loss.relative < 0.03
    again = pack.change("a weight", packed, codes, scales, change)
    assert torch.equal(again[0].view(torch.uint8), new_codes.view(torch.uint8)) and torch.equal(again[1], new_scales)


@pytest.mark.parametrize("form", ["fp8", "fp8-rows"])
def test_what_training_left_alone_keeps_its_bytes(form):
    packed, codes, scales, change = trained(form, by=0.005)
    change[32:] = 0
    new_codes, new_scales, _ = pack.change("a weight", packed, codes, scales, change)
    assert torch.equal(new_codes[32:].view(torch.uint8), codes[32:].view(torch.uint8))
    rows = -(-32 // min(packed.scheme.block[0], 32))
    assert torch.equal(new_scales[rows:], scales[rows:])
    same = pack.change("a weight", packed, codes, scales, torch.zeros_like(change))
    assert torch.equal(same[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(same[1], scales)
    assert (same[2].error, same[2].share) == (0, 1)


def test_a_number_lies_between_the_codes_next_to_it():
    packed, codes, scales, change = trained("fp8", by=0.5)
    new_codes, new_scales, _ = pack.change("a weight", packed, codes, scales, change)
    before = codes.float() * unpack.spread(scales, packed, 0, 256)
    target, each = before + change, unpack.spread(new_scales, packed, 0, 256)
    apart = (new_codes.float() * each - target).abs()
    assert bool((apart <= torch.maximum(target.abs() / 8, each * 2.0**-9) * 1.001).all())
    assert set((new_scales / scales).unique().tolist()) <= {1.0, 2.0, 4.0}


def test_a_release_of_the_tiny_kind_says_how_many_numbers_it_has(release):
    model = released.read(release())
    assert quantization.parameters(model.config, model.tensors) == 96 * 64 + 64
    assert quantization.size(model.config, model.tensors) == 96 * 64 * 2 + 64 * 4
    assert list(model.weights) == sorted(model.weights, key=lambda name: model.tensors[name].start)
    assert struct.calcsize("f") * 6 == model.tensors[SCALES].size
