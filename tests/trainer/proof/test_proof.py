"""A base and an export are proven against the release, and each weight that differs has a line."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.faults import Fault
from trainer.proof import findings

slow = pytest.mark.slow
EXPERTS = "model.layers.2.mlp.experts.{}.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def made(configure, ranks, tmp_path_factory):
    """made(kind, *overrides) -> run of a model that was converted, trained for two steps and exported."""

    def made(kind: str, *overrides: str):
        folder = tmp_path_factory.mktemp(kind)
        paths = [f"paths.{name}={folder / name}" for name in ("base", "output", "export", "logs")]
        run = configure(kind, *paths, "train.steps=2", *overrides)
        shutil.copytree(run.paths.model, folder / "model")
        run = configure(kind, *paths, f"paths.model={folder / 'model'}", "train.steps=2", *overrides)
        for command in ("convert", "train", "export"):
            result = ranks(command, run)
            assert result.code == 0, result.output
        return run

    return made


@pytest.fixture(scope="module")
def trained(made):
    return made("glm4-moe")


@pytest.fixture
def damaged(trained, tmp_path):
    """damaged(name) -> the trained run with a copy of this folder, and the copy."""

    def damaged(name: str):
        folder = tmp_path / name
        shutil.copytree(getattr(trained.paths, name), folder)
        paths = trained.paths.model_copy(update={name: str(folder), "logs": str(tmp_path / "logs")})
        return trained.model_copy(update={"paths": paths}), folder

    return damaged


def change(folder: Path, edit) -> None:
    """Change tensors of a model, each in its file."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        edit(tensors)
        if any(not tensors[name].equal(before[name]) for name in before):
            save_file(tensors, file, {"format": "pt"})


def flip_a_bit(tensors) -> None:
    if NORM in tensors:
        tensors[NORM].view(torch.int32)[3] ^= 1


def swap_experts(tensors) -> None:
    one, other = EXPERTS.format(0), EXPERTS.format(1)
    if one in tensors and other in tensors:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


@slow
def test_what_is_as_it_was_made_has_no_findings(trained, ranks):
    for command, said in (("proof.base", "to the last bit"), ("proof.export", "all others as released")):
        found = ranks(command, trained)
        assert found.code == 0 and said in found.output, found.output


@slow
def test_a_swapped_expert_and_a_flipped_bit_of_an_export_have_a_line_each(damaged, ranks):
    run, folder = damaged("export")
    change(folder / "merged", flip_a_bit)
    change(folder / "merged", swap_experts)
    config = folder / "merged/config.json"
    config.write_text(config.read_text().replace("1", "2", 1))  # a file of another length has no valid mark
    found = ranks("proof.export", run)
    lines = [line for line in found.output.splitlines() if line.startswith("differs: ")]
    assert found.code == 1 and len(lines) == 4, found.output
    assert all(any(name in line for line in lines) for name in (EXPERTS.format(0), EXPERTS.format(1), NORM, "config"))


@slow
def test_a_release_that_has_changed_under_its_base_is_named(damaged, ranks):
    run, folder = damaged("model")
    change(folder, flip_a_bit)
    found = ranks("proof.base", run)
    assert found.code == 1 and f"{NORM}: the base was made from other numbers" in found.output, found.output
    assert "differs from the release" in found.output


@slow
def test_a_flipped_bit_of_a_base_is_named(damaged, ranks):
    run, folder = damaged("base")
    largest = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    found = ranks("proof.base", run)
    assert found.code == 1 and found.output.count("differs: ") == 1, found.output


@slow
def test_a_base_of_another_model_is_no_base_of_this_one(trained, made, ranks):
    other = made("qwen3-moe")
    paths = trained.paths.model_copy(update={"base": other.paths.base})
    found = ranks("proof.base", trained.model_copy(update={"paths": paths}))
    assert found.code == 1 and "differs: " in found.output, found.output


def test_a_missing_shard_is_a_fault_before_anything_is_proven(configure, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(configure("glm4-moe").paths.model, folder)
    lost = sorted(folder.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(Fault, match=lost.name):
        findings.check_release(configure("glm4-moe", f"paths.model={folder}"))


@slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("glm4-moe-mtp", ("convert.to=none",)),
        ("deepseek-v3", ("adapter.targets=all-linear",)),
        ("gpt2", ()),
        ("gpt-oss", ()),
        ("mixtral", ("adapter.kind=none",)),
        ("qwen3", ("adapter.kind=dora",)),  # tied embeddings
        ("qwen2-moe", ("train.precision=bf16",)),
    ],
)
def test_every_kind_of_training_is_proven(kind, more, made, ranks):
    run = made(kind, *more)
    for command in ("proof.base", "proof.export"):
        found = ranks(command, run)
        assert found.code == 0, found.output
