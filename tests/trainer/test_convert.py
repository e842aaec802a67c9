"""Conversion loses nothing, at any layout, and says by name what does not fit."""

import errno
import filecmp
import hashlib
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from conf.model_files import config_json
from contract import checkpoints, output_marks
from contract.faults import Fault
from contract.output_marks import BASE
from tests.support import mxfp4_release
from trainer.rehearsal import tiny_models
from trainer.weights import atomic_folder, file_sums, released, torch_dist

# Converted at these layouts, in this precision; exported on one process.
CASES = [
    ("llama", "fp32", "tp=2 gpus_per_node=2"),
    ("glm4-moe", "bf16", "pp=2 vpp=2 gpus_per_node=2"),
    ("glm4-moe-mtp", "fp32", "tp=2 sp=true ep=2 gpus_per_node=2"),
    ("glm4-moe-mtp", "bf16", "pp=2 gpus_per_node=2"),
    pytest.param("deepseek-v3", "fp32", "pp=2 ep=2 gpus_per_node=4", marks=pytest.mark.slow),
    ("qwen3-moe", "bf16", "tp=2 sp=true etp=2 gpus_per_node=2"),
    pytest.param("qwen3", "bf16", "tp=2 pp=2 gpus_per_node=4", marks=pytest.mark.slow),
    ("gpt-oss", "bf16", "tp=2 sp=true ep=2 gpus_per_node=2"),
    ("nemotron-h-mtp", "bf16", "tp=2 sp=true ep=2 gpus_per_node=2"),
]


@pytest.fixture
def start(configure, ranks, tmp_path):
    """start(command, kind, *overrides) -> the result; the model, if it is not there, is made in bf16."""

    def start(command: str, kind: str, *overrides: str):
        model = tmp_path / "model"
        if not model.exists():
            tiny_models.make_model(kind, model)
        paths = [f"paths.{name}={tmp_path / name}" for name in ("model", "base", "output", "export")]
        return ranks(command, configure(kind, *paths, "export.checkpoint=base", *overrides))

    return start


def cut(layout: str) -> list[str]:
    return [f"layout.{pair}" for pair in layout.split()]


def same_files(folder: Path, other: Path) -> bool:
    names = sorted(path.name for path in folder.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        filecmp.cmp(folder / name, other / name, shallow=False) for name in names
    )


@pytest.mark.parametrize(("kind", "precision", "layout"), CASES)
def test_there_and_back_is_the_same_to_the_last_byte(kind, precision, layout, start, tmp_path):
    converted = start("convert", kind, f"train.precision={precision}", *cut(layout))
    assert converted.code == 0, converted.output
    exported = start("export", kind)
    assert exported.code == 0, exported.output
    assert same_files(tmp_path / "model", tmp_path / "export/merged")


MTP = [("glm4-moe-mtp", "model.layers.4."), ("qwen3-next-mtp", "mtp."), ("nemotron-h-mtp", "mtp.")]


@pytest.mark.parametrize(("kind", "layer"), MTP)
def test_mtp_that_is_not_trained_comes_back_from_the_release(kind, layer, start, tmp_path):
    converted = start("convert", kind, "model.mtp=false")
    assert converted.code == 0, converted.output
    left_out = checkpoints.require(tmp_path / "base", "", "")["left_out"]
    assert left_out
    assert all(name.startswith(layer) for name in left_out)
    exported = start("export", kind, "model.mtp=false")
    assert exported.code == 0, exported.output
    assert same_files(tmp_path / "model", tmp_path / "export/merged")


def rewrite(model: Path, change) -> None:
    """Change the tensors of a checkpoint; they end up in a single file."""
    tensors = {}
    for file in model.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def as_openai_names_them(tensors):
    for name in [*tensors]:
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def test_gpt2_of_openai_names_is_converted_and_compared_and_comes_back(start, tmp_path):
    tiny_models.make_model("gpt2", tmp_path / "model")
    rewrite(tmp_path / "model", as_openai_names_them)
    converted = start("convert", "gpt2", "train.precision=bf16", "model.compare=true")
    assert converted.code == 0, converted.output
    differences = json.loads((tmp_path / "base/layers.json").read_text())["differences"]
    assert [*differences] == ["h.0", "the logits"] and max(differences.values()) < 1e-5
    exported = start("export", "gpt2")
    assert exported.code == 0, exported.output
    found = load_file(tmp_path / "export/merged/model.safetensors")
    released = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == released.keys() and all(found[name].equal(released[name]) for name in found)


def stack_experts(tensors, layer):
    module = f"{layer}.mlp.experts"
    gates, ups, downs = (
        torch.stack([tensors.pop(f"{module}.{expert}.{leaf}_proj.weight") for expert in range(8)])
        for leaf in ("gate", "up", "down")
    )
    tensors |= {f"{module}.gate_up_proj": torch.cat((gates, ups), 1), f"{module}.down_proj": downs}


def as_qwen_releases_them(tensors):
    """One tensor for all experts of a layer, but not in the layer of multi-token prediction, and a vision tower."""
    for layer in range(4):
        stack_experts(tensors, f"model.language_model.layers.{layer}")
    tensors["model.visual.merger.norm.weight"] = torch.randn(16)


def as_a_text_model(tensors):
    """Separate experts, although the layer of multi-token prediction has one tensor for all of its experts."""
    for name in [*tensors]:
        tensors[name.replace(".language_model.", ".")] = tensors.pop(name)
    stack_experts(tensors, "mtp.layers.0")


def as_transformers_saves_them(tensors):
    """Without the layer of multi-token prediction, which config.json still has."""
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


FORMS = [("qwen3-5-moe-mtp", form) for form in (as_qwen_releases_them, as_a_text_model, as_transformers_saves_them)]
FORMS.append(("nemotron-h-mtp", as_transformers_saves_them))


@pytest.mark.parametrize(("kind", "change"), FORMS)
def test_every_form_of_a_release_with_mtp_is_compared_and_comes_back(kind, change, start, tmp_path):
    tiny_models.make_model(kind, tmp_path / "model")
    rewrite(tmp_path / "model", change)
    if change is as_a_text_model:
        place = tmp_path / "model/config.json"
        config = config_json.of_text(json.loads(place.read_text()))
        names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
        place.write_text(json.dumps(config | names))
    converted = start("convert", kind, "train.precision=bf16", "model.compare=true")
    assert converted.code == 0, converted.output
    differences = json.loads((tmp_path / "base/layers.json").read_text())["differences"]
    assert ("mtp.layers.0" in differences) == (change is not as_transformers_saves_them)
    assert max(differences.values()) < 1e-4
    exported = start("export", kind)
    assert exported.code == 0, exported.output
    assert same_files(tmp_path / "model", tmp_path / "export/merged")


def test_gpt_oss_as_it_is_released_is_compared_and_comes_back_unpacked(start, tmp_path):
    mxfp4_release.make(tmp_path / "model")
    converted = start("convert", "gpt-oss", "train.precision=bf16", "model.compare=true")
    assert converted.code == 0, converted.output
    differences = json.loads((tmp_path / "base/layers.json").read_text())["differences"]
    assert [*differences] == ["model.layers.0", "model.layers.1", "the logits"] and max(differences.values()) < 1e-5
    exported = start("export", "gpt-oss")
    assert exported.code == 0, exported.output
    assert "quantization_config" not in json.loads((tmp_path / "export/merged/config.json").read_text())
    found = load_file(tmp_path / "export/merged/model.safetensors")
    expected = mxfp4_release.unpacked(tmp_path / "model")
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


def extra(tensors):
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors["model.norm.weight"].clone()


def no_longer_extra(tensors):
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    tensors["model.norm.weight"].zero_()


def second_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def another_second_head(tensors):
    second_head(tensors)
    tensors["lm_head.weight"][7, 7] += 1


def missing(tensors):
    del tensors["model.layers.2.mlp.up_proj.weight"]


def wrong_shape(tensors):
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].repeat(2, 1)


def transposed(tensors):
    name = "model.layers.3.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def other_head(tensors):
    tensors["model.layers.4.shared_head.head.weight"][7, 7] += 1


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", extra, "nothing in the model uses (1): model.layers.0.self_attn.q_norm.weight"),
        ("llama", missing, "missing (1): model.layers.2.mlp.up_proj.weight"),
        ("llama", wrong_shape, "model.layers.1.self_attn.k_proj.weight is [128, 128] and should be [64, 128]"),
        ("llama", transposed, "model.layers.3.mlp.down_proj.weight is [256, 128] and should be [128, 256]"),
        ("glm4-moe-mtp", other_head, "model.layers.4.shared_head.head.weight (of lm_head.weight)"),
        ("qwen3", another_second_head, "lm_head.weight (of model.embed_tokens.weight)"),
    ],
)
def test_what_does_not_fit_is_named(kind, change, said, start, tmp_path):
    tiny_models.make_model(kind, tmp_path / "model")
    rewrite(tmp_path / "model", change)
    result = start("convert", kind, "layout.pp=2", "layout.gpus_per_node=2")
    assert result.code == 2
    (line,) = {line for line in result.output.splitlines() if line.startswith("error: ")}
    assert said in line
    assert not (tmp_path / "base").exists()
    assert not (tmp_path / "base.partial").exists()


@pytest.mark.slow
def test_a_vocabulary_that_is_released_twice_comes_back_twice(start, tmp_path):
    """As that of Qwen3-0.6B."""
    tiny_models.make_model("qwen3", tmp_path / "model")
    rewrite(tmp_path / "model", second_head)
    converted = start("convert", "qwen3", "layout.pp=2", "layout.gpus_per_node=2")
    assert converted.code == 0, converted.output
    assert start("export", "qwen3").code == 0
    assert same_files(tmp_path / "model", tmp_path / "export/merged")


def test_a_parameter_that_nothing_fills_is_named(start, tmp_path):
    tiny_models.make_model("llama", tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_bias": True}))
    result = start("convert", "llama")
    assert result.code == 2
    assert "no tensor fills (4): decoder.layers.0.self_attention.linear_qkv.bias, decoder.layers.1" in result.output


def test_what_is_there_already_is_left_alone_and_what_changed_is_replaced(start, tmp_path):
    assert "holds all 39 tensors" in start("convert", "llama").output
    mark = (tmp_path / "base/complete.json").stat()
    assert "already exists, from these 39 tensors" in start("convert", "llama").output
    rewrite(tmp_path / "model", lambda tensors: None)  # other files, the same tensors
    assert "already exists, from the same 39 tensors" in start("convert", "llama").output
    assert (tmp_path / "base/complete.json").stat().st_mtime_ns == mark.st_mtime_ns

    rewrite(tmp_path / "model", extra)
    assert start("convert", "llama").code == 2
    assert checkpoints.read_mark(tmp_path / "base"), "a failure takes nothing away"
    rewrite(tmp_path / "model", no_longer_extra)
    assert "holds all 39 tensors" in start("convert", "llama").output
    assert "holds all 39 tensors" in start("convert", "llama", "train.precision=bf16").output, "another base"
    assert start("export", "llama").code == 0
    assert not load_file(tmp_path / "export/merged/model.safetensors")["model.norm.weight"].any()


def test_a_base_of_an_earlier_version_is_left_alone_and_exported(start, tmp_path):
    """It has recorded SHA-256 of each tensor."""
    assert "holds all 39 tensors" in start("convert", "llama").output
    base, model = tmp_path / "base", released.read(tmp_path / "model")
    facts = {name: fact for name, fact in checkpoints.read_mark(base).items() if name != "files"}
    rows = json.loads((base / released.SOURCE).read_text())
    for name, entry in model.tensors.items():
        content = (model.folder / entry.file).read_bytes()[entry.start : entry.start + entry.size]
        rows[name][2] = hashlib.sha256(content).hexdigest()
    (base / released.SOURCE).write_text(json.dumps(rows))
    checkpoints.mark(base, **facts | {"digest": released.digest(model, {name: row[2] for name, row in rows.items()})})
    rewrite(tmp_path / "model", lambda tensors: None)  # other files, the same tensors
    assert "already exists, from the same 39 tensors" in start("convert", "llama").output
    exported = start("export", "llama")
    assert exported.code == 0, exported.output


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(wrapped, tmp_path):
    folder = tmp_path / "base"
    with atomic_folder.write(folder, {"architecture": "old"}, BASE, "old") as partial:
        (partial / "weights").write_text("old")

    def fill():
        with atomic_folder.write(folder, {"architecture": "new"}, BASE, "new") as partial:
            (partial / "weights").write_text("half")
            full = OSError(errno.ENOSPC, "No space left on device")
            if wrapped:
                raise RuntimeError("a writer failed") from full
            raise full

    with pytest.raises(Fault, match=f"{folder}: could not be written, the disk is full"):
        fill()
    assert checkpoints.require(folder, "", "")["architecture"] == "old"
    assert (folder / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_one_of_several_ranks_compares_the_layers(start, tmp_path):
    converted = start("convert", "glm4-moe-mtp", "model.compare=true", "layout.gpus_per_node=2")
    assert converted.code == 0, converted.output
    assert max(json.loads((tmp_path / "base/layers.json").read_text())["differences"].values()) < 1e-5


def test_a_comparison_afterwards_leaves_a_whole_base(start, tmp_path):
    assert start("convert", "llama").code == 0
    compared = start("compare", "llama")
    assert compared.code == 0, compared.output
    assert checkpoints.read_mark(tmp_path / "base")["files"].keys() >= {"layers.json", "source.json"}
    assert not [*output_marks.problems(tmp_path / "base", BASE)]


def test_a_base_that_was_damaged_is_not_exported(start, tmp_path):
    assert start("convert", "llama").code == 0
    file = max((tmp_path / "base/iter_0000000").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    exported = start("export", "llama")
    assert exported.code == 2, exported.output
    assert f"error: {file}: damaged where " in exported.output
    assert not (tmp_path / "export").exists()


def test_of_a_damaged_file_the_one_weight_is_named_that_is_not_whole(start, tmp_path):
    assert start("convert", "llama").code == 0
    folder = tmp_path / "base/iter_0000000"
    stored = torch_dist.open_checkpoint(folder)
    pieces = stored.metadata.storage_data.values()
    assert stored.sums.keys() == {file_sums.name(piece.relative_path, piece.offset) for piece in pieces}
    file = damage(stored)
    (line,) = faults(stored)
    assert line.startswith(f"{file}: damaged where ")


def test_of_a_base_of_before_the_one_weight_is_named_by_its_archive(tmp_path):
    """With the checksum of its file, and without any beside it."""
    weights = {f"decoder.final{number}.weight": torch.randn(32, 64) for number in range(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        save(weights, checkpoint_id=tmp_path, no_dist=True)
    sums = {file.name: file_sums.of(file) for file in tmp_path.glob("*.distcp")}
    stored = torch_dist.open_checkpoint(tmp_path)
    assert not faults(replace(stored, sums=sums)) and not faults(stored)
    file = damage(stored)
    for known in (sums, {}):
        (line,) = faults(replace(stored, sums=known))
        assert line.startswith(f"{file}: damaged where ")


def damage(stored: torch_dist.Stored) -> Path:
    """Change a byte of the largest piece. Returns its file."""
    largest = max(stored.metadata.storage_data.values(), key=lambda piece: piece.length)
    file = stored.folder / largest.relative_path
    content = bytearray(file.read_bytes())
    content[largest.offset + largest.length // 2] ^= 1
    file.write_bytes(content)
    return file


def faults(stored: torch_dist.Stored) -> set[str]:
    """What is said of all weights, each read anew."""
    opened, said = replace(stored, whole={}, layouts={}), set()
    for place in opened.places.values():
        try:
            torch_dist.read(opened, place)
        except Fault as fault:
            said.add(str(fault))
    return said
