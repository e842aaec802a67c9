"""A trained Llama served three ways by real vLLM: merged, as the base with its adapter beside it, and rounded to FP8.

A CPU computes nothing in FP8: weights are rounded to it and back in copies of the models.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.serving import agreement

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work, short_rows):
    base("llama")
    output = work / "unmerged"
    output.mkdir()
    data = short_rows(output / "rows")
    paths = {"data": data, "output": output, "parity": output / "parity.json", "export": output / "export"}
    paths |= {"served": output / "export/merged"}
    asked = ["evaluate.rows=8", "evaluate.max_tokens=8"]
    run = configure("llama", *(f"paths.{key}={path}" for key, path in paths.items()), *asked)
    for command in ("train", "export"):
        result = ranks(command, run)
        assert result.code == 0, result.output
    return run


@pytest.fixture(scope="module")
def served(trained, evaluate, tmp_path_factory):
    """served(name, adapter, **changes of paths) -> what evaluation found, and what the model says of the prompts."""

    def served(name: str, adapter: str = "merged", **paths: object):
        folder = tmp_path_factory.mktemp(name)
        changed = trained.paths.model_copy(update={key: str(path) for key, path in paths.items()})
        changed = changed.model_copy(update={"evaluation": str(folder / "evaluation")})
        asked = trained.evaluate.model_copy(update={"adapter": adapter})
        result = evaluate(trained.model_copy(update={"paths": changed, "evaluate": asked}), folder)
        record = json.loads((folder / "evaluation" / agreement.RECORD).read_text())["rows"]
        return result, [row["log_probs"] for row in record], [row["written"] for row in record]

    return served


@pytest.fixture(scope="module")
def merged(served):
    return served("merged")


def test_base_and_adapter_say_what_the_merged_model_says(merged, served, trained, ranks, tmp_path):
    alone = trained.export.model_copy(update={"formats": ("adapter",)})
    paths = trained.paths.model_copy(update={"export": str(tmp_path / "export")})
    exported = ranks("export", trained.model_copy(update={"export": alone, "paths": paths}))
    assert exported.code == 0, exported.output
    assert not (tmp_path / "export/merged").exists()
    result, found, written = served("beside", "unmerged", export=tmp_path / "export", served="/nowhere")
    assert result.code == 0, result.errors
    parity, of_merged = result.results["parity"], merged[0].results["parity"]
    assert parity["bound"] == 1e-3 and parity["mean"] < 1e-4 and parity["decoded"]["mean"] < 1e-4
    assert abs(parity["lost"]["share"]) < 1e-3 < parity["lost"]["effect"]
    every = [abs(a - b) for one, other in zip(found, merged[1], strict=True) for a, b in zip(one, other, strict=True)]
    assert max(every) < 1e-3 and written == merged[2]
    assert result.results["metrics"].keys() == merged[0].results["metrics"].keys()
    assert of_merged["step"] == parity["step"] == 6
    assert f"{trained.paths.model} with the adapter {tmp_path}/export/adapter" in result.output
    assert "64 tokens as written and as read: " in result.output


def test_the_adapter_of_other_weights_is_found(served, trained, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(trained.paths.export, export)
    weights = load_file(export / "adapter/adapter_model.safetensors")
    halved = {name: tensor * (0.5 if "lora_B" in name else 1) for name, tensor in weights.items()}
    save_file(halved, export / "adapter/adapter_model.safetensors", {"format": "pt"})
    result, _, _ = served("halved", "unmerged", export=export)
    assert result.code == 2 and "of the adapter's effect is lost, the bound is 1%" in result.errors


def rounded(model: Path, folder: Path) -> Path:
    """Copy of a model whose matrices are rounded to FP8, with a scale for each row."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                scale = weight.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
                weights[name] = ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
        save_file(weights, file, {"format": "pt"})
    return folder


def test_a_model_in_fp8_is_held_to_its_base_in_fp8(merged, served, trained, tmp_path):
    of_base = served("base", served=rounded(Path(trained.paths.model), tmp_path / "base"))[1]
    tuned = served("tuned", served=rounded(Path(trained.paths.served), tmp_path / "tuned"))[1]
    record = json.loads(Path(trained.paths.parity).read_text())
    bound = agreement.BOUNDS["fp8"]
    parity = agreement.judge(record, tuned, bound, of_base)
    assert parity["ok"] and agreement.BOUNDS["fp32"] < parity["mean"] < parity["bound"] < parity["base"]
    assert f"the rounded base differs by {parity['base']:.3g} nats" in agreement.summary(parity, "")
    assert not agreement.judge(record, of_base, bound, of_base)["ok"]
    half = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in zip(tuned, of_base, strict=True)]
    assert not agreement.judge(record, half, bound, of_base)["ok"]
