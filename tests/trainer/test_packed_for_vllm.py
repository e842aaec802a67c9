"""export.quantization: packed writes vLLM's formats; their own library reads the numbers that training unpacks."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.model_files import quantization
from conf.model_files.safetensors_header import Entry
from conf.rules.packed_base import FORMATS
from trainer.weights import released, released_tensors
from trainer.weights.exported import file_format
from trainer.weights.packed_base import files, packing
from trainer.weights.packed_base.part import Part, unpacked
from trainer.weights.quantised import e2m1
from trainer.weights.quantised.unpack import unpack

slow = pytest.mark.slow
ROWS = [
    ("qwen3-moe", "int4", [], False),
    ("qwen3", "int4", [], True),
    ("glm4-moe-mtp", "int4", ["model.pack=[experts,attention]", "layout.gpus_per_node=2", "layout.ep=2"], True),
    ("llama", "fp8", ["model.pack=[dense]"], True),
    ("glm4-moe-mtp", "nvfp4", ["layout.gpus_per_node=2", "layout.tp=2"], True),
    ("qwen3-moe", "mxfp4", ["model.pack=[attention]"], True),
    ("qwen2-moe", "int4", [], True),
    ("mistral", "int4", [], True),
    ("deepseek-v3", "int4", [], True),
    ("minimax-m2", "int4", [], True),
    ("kimi-k2", "mxfp4", [], True),
    ("glm4-moe-lite", "int4", [], True),
    ("qwen3-5", "int4", [], True),
    ("qwen3-5-moe-mtp", "int4", [], True),
    ("qwen3-next-mtp", "int4", [], True),
    ("mixtral", "int4", [], True),
    ("gemma3", "int4", [], True),
]


@pytest.fixture
def packed(configure, ranks, tmp_path):
    """packed(kind, form, *overrides) -> what the export of a packed base did."""

    def packed(kind: str, form: str, *overrides: str):
        paths = [f"paths.{name}={tmp_path / name}" for name in ("base", "output", "logs", "export")]
        keys = [*paths, f"model.base={form}", "convert.to=packed", "train.precision=bf16", *overrides]
        done = ranks("convert", configure(kind, *keys))
        assert done.code == 0, done.output[-3000:]
        return ranks("export", configure(kind, *keys, "export.checkpoint=base", "export.quantization=packed"))

    return packed


def in_training(base: Path, form: str) -> Iterable[torch.Tensor]:
    """Yield the matrices that training unpacks."""
    source = files.open_packed(base, FORMATS[form])
    for name, row in source.index.items():
        for number in range(row.get("matrices", 0)):
            part = Part.of_matrix(name, source.shape(name), number, row["matrices"])
            block = (row["height"], FORMATS[form].block[1])
            yield unpacked(source.of_part(part, block), block).bfloat16()


def counted(matrix: torch.Tensor) -> Counter:
    """Return how often the matrix has each row. ModelOpt reads the code of -0 as 0."""
    return Counter(row.numpy().tobytes() for row in (matrix + 0.0).view(torch.int16))


def of_release(form: str, name: str, read) -> torch.Tensor:
    """Return a released matrix, packed and unpacked. `read` returns a released matrix by its name."""
    weight, top = read(name), None
    if form == "nvfp4":
        groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
        fused = next((group for group in groups if any(part in name for part in group)), ())
        own = next((part for part in fused if part in name), "")
        top = torch.stack([read(name.replace(own, part)).abs().amax() for part in fused or [own]]).amax().float()
    return unpacked(packing.of_matrix(FORMATS[form], weight, top), FORMATS[form].block).bfloat16()


def by_library(tensors: dict[str, torch.Tensor], name: str, section: dict) -> torch.Tensor:
    """Return a weight as the format's own library reads it from the tensors of a file."""
    if section["quant_method"] == "fp8":
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        return Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.bfloat16)
    if section["quant_method"] == "modelopt":
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        codes, size = tensors[name], section["group_size"]
        scales = {"scale": tensors[f"{name}_scale"], "double_scale": tensors[f"{name}_scale_2"]}
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        return NVFP4QTensor(shape, torch.bfloat16, codes).dequantize(torch.bfloat16, **scales, block_sizes={-1: size})
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(section).config_groups.values()
    ends = [end for end in ("packed", "scale", "shape") if f"{name}_{end}" in tensors]
    module = {f"weight_{end}": tensors[f"{name}_{end}"] for end in ends}
    library: Any = BaseCompressor.get_value_from_registry(section["format"])
    return library.decompress(module, scheme)["weight"]


@pytest.mark.filterwarnings("ignore")  # of what the libraries import
@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4", pytest.param("nvfp4", marks=slow)])
def test_the_library_of_each_format_reads_our_numbers(name):
    form, weight = FORMATS[name], torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    top = e2m1.nvfp4(weight * 3)[2] * e2m1.TOP * e2m1.TOP_OF_SCALES
    found = packing.of_matrix(form, weight, top if form.factor_bytes else None)
    tensors = file_format.tensors(form, "a.weight", tuple(weight.shape), found)
    entries = file_format.entries(form, "a.weight", tuple(weight.shape))
    types = released_tensors.DTYPES | released_tensors.CODES
    assert {key: (types[dtype], shape) for key, (dtype, shape) in entries.items()} == {
        key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
    }
    section = file_format.section(form, ["lm_head", "model.layers.1.mlp.experts.0.up_proj"])
    numbers = by_library(tensors, "a.weight", section)
    assert numbers.dtype == torch.bfloat16 and torch.equal(numbers, unpacked(found, form.block).bfloat16())
    config = {"quantization_config": section, "dtype": "bfloat16"}
    (packed,) = quantization.packed(config, {name: Entry(*entry, "", 0, 0) for name, entry in entries.items()}).values()
    scales = tensors[packed.scales].float() * tensors[packed.factor] if packed.factor else tensors[packed.scales]
    assert torch.equal(unpack(packed, tensors[packed.codes], scales, torch.bfloat16), numbers)
    listed = section.get("ignore") or section["modules_to_not_convert"]
    assert len(listed) == 2 and quantization._is_among("model.layers.1.mlp.experts.7.down_proj", tuple(listed))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "form", "keys"), [pytest.param(*row[:3], marks=slow if row[3] else ()) for row in ROWS]
)
def test_the_formats_own_library_reads_what_training_unpacks(kind, form, keys, packed, configure, tmp_path):
    done = packed(kind, form, *keys)
    assert done.code == 0, done.output[-3000:]
    folder, release = tmp_path / "export/merged", released.read(Path(configure(kind).paths.model))
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    before = json.loads((release.folder / "config.json").read_text())
    assert config == {key: value for key, value in before.items() if key != "quantization_config"}
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    read = lambda name: released_tensors.read(release, name).bfloat16()  # noqa: E731
    copied = {name for name in release.weights if name in tensors and tensors[name].element_size() > 1}
    rows = Counter()
    in_bf16 = {*filter(file_format.IN_BF16.fullmatch, copied)}
    for name in (release.weights.keys() - copied) | in_bf16:
        numbers = tensors[name].bfloat16() if name in in_bf16 else by_library(tensors, name, section)
        assert numbers.dtype == torch.bfloat16 and torch.equal(numbers, of_release(form, name, read)), name
        rows += counted(numbers)
    assert rows and rows == sum(map(counted, in_training(tmp_path / "base", form)), Counter())
    for name in copied:
        assert name in in_bf16 or torch.equal(tensors[name].bfloat16(), read(name)), name
    matrices = {name.removesuffix(".weight") for name in copied if len(release.weights[name].shape) == 2}
    assert section == json.loads(json.dumps(file_format.section(FORMATS[form], matrices | {"lm_head"})))


@slow
@pytest.mark.parametrize(
    ("kind", "form", "said"),
    [
        ("llama", "fp8", "share no scales in blocks of 128"),
        ("nemotron-h", "nvfp4", "these have several factors, and vLLM takes one"),
        ("gpt-oss-mxfp4", "mxfp4", "the release stores these in other shapes: decoder.layers.0.mlp.experts"),
    ],
)
def test_codes_that_vllm_cannot_take_are_refused_in_one_line(kind, form, said, packed):
    done = packed(kind, form)
    assert done.code == 2 and said in done.output, done.output[-2000:]
