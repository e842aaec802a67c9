"""The codes of a packed base, served by real vLLM with the adapter next to them, give what training computed."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from trainer.serving import agreement

pytestmark = pytest.mark.slow
ROWS = 4


@pytest.fixture(scope="module")
def trained(configure, ranks, work, short_rows):
    """The run of a finished training on int4, and its base for vLLM."""
    folder = work / "packed-serving"
    folder.mkdir()
    data = short_rows(folder / "rows")
    places = ("base", "output", "logs", "export")
    paths = [f"paths.data={data}", f"paths.parity={folder}/parity.json", *(f"paths.{p}={folder / p}" for p in places)]
    keys = ["model.base=int4", "convert.to=packed", "train.precision=bf16", f"evaluate.parity_rows={ROWS}"]
    keys += ["evaluate.rows=8", "evaluate.max_tokens=8", "optimizer.lr=2e-3"]
    codes = ["export.checkpoint=base", "export.quantization=packed"]
    run = configure("qwen3", *paths, *keys, "evaluate.adapter=packed", "export.formats=[adapter]")
    for command, asked in ("convert", run), ("train", run), ("export", run):
        done = ranks(command, asked)
        assert done.code == 0, done.output[-3000:]
    done = ranks("export", configure("qwen3", *paths[:-1], f"paths.export={folder}/codes", *keys, *codes))
    assert done.code == 0, done.output[-3000:]
    return run


@pytest.fixture(scope="module")
def served(trained, evaluate, tmp_path_factory):
    """served(name, adapter, **changes of paths) -> what an evaluation found."""

    def served(name: str, adapter: str = "packed", **paths: object):
        folder = tmp_path_factory.mktemp(name)
        changes = {"evaluation": folder / "evaluation", **paths}
        changed = {key: str(path) for key, path in changes.items()}
        return evaluate(trained.changed(paths=changed, evaluate={"adapter": adapter}), folder)

    return served


@pytest.fixture(scope="module")
def codes(trained) -> Path:
    return Path(trained.paths.export).parent / "codes/merged"


@pytest.fixture(scope="module")
def of_base(served, codes):
    result = served("base", "merged", served=codes, parity="/nowhere/parity.json")
    assert result.code == 0, result.output + result.errors
    return result


def test_the_codes_and_the_adapter_agree_with_training_within_what_the_kernels_round(of_base, served, codes):
    result = served("tuned", model=codes, of_base=of_base.folder)
    assert result.code == 0, result.output + result.errors
    parity = result.results["parity"]
    assert parity["same_codes"] and parity["mean"] < parity["bound"] <= agreement.BOUNDS["packed"]
    assert parity["base"] < parity["lost"]["effect"] and abs(parity["lost"]["share"]) < agreement.LOST


def test_the_released_weights_and_half_an_adapter_are_found(of_base, served, codes, trained, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(trained.paths.export, export)
    weights = load_file(export / "adapter/adapter_model.safetensors")
    halved = {name: tensor * (0.5 if "lora_B" in name else 1) for name, tensor in weights.items()}
    save_file(halved, export / "adapter/adapter_model.safetensors", {"format": "pt"})
    result = served("halved", model=codes, of_base=of_base.folder, export=export)
    assert result.code == 2 and "of the adapter's effect is lost, the bound is 1%" in result.errors
    of_release = served("released", "merged", served=trained.paths.model, parity="/nowhere/parity.json")
    result = served("other", of_base=of_release.folder)
    assert result.code == 2 and "of the base alone differ by" in result.errors


def test_scales_of_another_tensor_are_found(of_base, served, codes, tmp_path):
    model = tmp_path / "codes/merged"
    shutil.copytree(codes.parent, model.parent)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("up_proj.weight_scale")]:
            gate = name.replace("up_proj", "gate_proj")
            tensors[name] = tensors[gate].flip(1).contiguous()
        save_file(tensors, file, {"format": "pt"})
    result = served("scales", model=model, of_base=of_base.folder)
    assert result.code == 2 and "parity: the served model is not the trained one" in result.errors
