"""A quantised release on its whole way: converted, trained on and exported, without a copy in bf16."""

import json

import pytest
import torch
from safetensors.torch import load_file

from trainer.rehearsal import tiny_models
from trainer.weights import released, released_tensors


@pytest.fixture
def start(configure, ranks, tmp_path):
    """start(command, kind, *overrides) -> its output"""

    def start(command: str, kind: str, *overrides: str) -> str:
        paths = [f"paths.{name}={tmp_path / name}" for name in ("model", "base", "output", "export")]
        given = {override.partition("=")[0] for override in overrides}
        paths = [path for path in paths if path.partition("=")[0] not in given]
        result = ranks(command, configure(kind, *paths, *overrides))
        assert result.code == 0, result.output[-4000:]
        return result.output

    return start


def weights(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


def test_the_base_of_an_fp8_release_is_what_is_unpacked_and_comes_back_as_that(start, configure, tmp_path):
    tiny_models.make_model("glm4-moe-mtp-fp8", tmp_path / "model", block=48)  # which divides nothing
    model = released.read(tmp_path / "model")
    assert len(model.packed) > 100
    start("convert", "glm4-moe-mtp-fp8", "train.precision=bf16", "layout.ep=2", "layout.gpus_per_node=2")
    start("export", "glm4-moe-mtp-fp8", "train.precision=bf16", "export.checkpoint=base")
    merged = tmp_path / "export/merged"
    assert same(weights(merged), {name: released_tensors.read(model, name) for name in model.weights})
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    again = released.read(merged)
    assert (again.packed, list(again.weights)) == ({}, list(model.weights))
