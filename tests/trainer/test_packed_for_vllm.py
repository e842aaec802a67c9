"""export.quantization: packed writes vLLM's formats; their own library reads the numbers that training unpacks."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.rules.packed_base import FORMATS
from trainer.weights import released, released_tensors
from trainer.weights.packed_base import files
from trainer.weights.packed_base.part import Part, unpacked

slow = pytest.mark.slow
ROWS = [
    ("qwen3-moe", "int4", [], False),
    ("qwen3", "int4", [], True),
    ("glm4-moe-mtp", "int4", ["model.pack=[experts,attention]", "layout.gpus_per_node=2", "layout.ep=2"], True),
    ("llama", "fp8", ["model.pack=[dense]"], True),
]
ENDS = "weight_packed", "weight_scale", "weight_shape"


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


def in_training(base: Path, form: str, config: dict) -> dict[str, torch.Tensor]:
    """Numbers that training unpacks, by the end of their names in the release."""
    source, found = files.open_packed(base, FORMATS[form]), {}
    heads, groups, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    for name, row in source.index.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.linear_(\w+)\.weight(\d*)", name)
        if "height" not in row or not match:
            continue
        parts = [Part.of_matrix(name, source.shape(name), i, row["matrices"]) for i in range(row["matrices"])]
        block = (row["height"], FORMATS[form].block[1])
        matrices = [unpacked(source.of_part(part, block), block).bfloat16() for part in parts]
        layer, module, kind, expert = match.groups()
        stem = f"layers.{layer}.{module}.{expert}".rstrip(".").replace("self_attention", "self_attn")
        if kind == "qkv":
            rows = matrices[0].view(groups, heads // groups + 2, width, -1)
            matrices = [rows[:, :-2].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)]
        names = {"qkv": ("q_proj", "k_proj", "v_proj"), "proj": ("o_proj",), "fc1": ("gate_proj", "up_proj")}
        for each, matrix in zip(names.get(kind, ("down_proj",)), matrices, strict=True):
            found[f"model.{stem}.{each}.weight"] = matrix
    return found


def by_library(tensors: dict[str, torch.Tensor], name: str, section: dict) -> torch.Tensor:
    if section["quant_method"] == "fp8":
        rows, columns = tensors[name].shape
        height, width = section["weight_block_size"]
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(height, 0).repeat_interleave(width, 1)
        return (tensors[name].float() * scales[:rows, :columns]).bfloat16()
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    stem = name.removesuffix("weight")
    scheme = QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    return PackedQuantizationCompressor.decompress({end: tensors[stem + end] for end in ENDS}, scheme)["weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what compressed-tensors imports
@pytest.mark.parametrize(
    ("kind", "form", "keys"), [pytest.param(*row[:3], marks=slow if row[3] else ()) for row in ROWS]
)
def test_the_formats_own_library_reads_what_training_unpacks(kind, form, keys, packed, configure, tmp_path):
    done = packed(kind, form, *keys)
    assert done.code == 0, done.output[-3000:]
    folder, release = tmp_path / "export/merged", released.read(Path(configure(kind).paths.model))
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == release.config
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = in_training(tmp_path / "base", form, config)
    assert expected
    for name, numbers in expected.items():
        found = by_library(tensors, name, section)
        assert found.dtype == torch.bfloat16 and torch.equal(found, numbers), name
    rest = {name for name in release.weights if name in tensors} - expected.keys()
    for name in rest:
        assert torch.equal(tensors[name].bfloat16(), released_tensors.read(release, name).bfloat16()), name
    skipped = section.get("ignore") or section["modules_to_not_convert"]
    matrices = {name.removesuffix(".weight") for name in rest if len(release.weights[name].shape) == 2}
    assert {*skipped} == matrices | {"lm_head"}


@slow
def test_rows_that_share_no_scales_in_vllms_blocks_are_refused(packed):
    done = packed("llama", "fp8")
    assert done.code == 2 and "share no scales in blocks of 128" in done.output
