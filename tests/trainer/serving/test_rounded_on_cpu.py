"""A merged model in 4 bits, served by real vLLM and loaded by transformers; its loss is measured and limited."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.test_packed_for_vllm import by_library

pytestmark = pytest.mark.slow
ROWS = 4


@pytest.fixture(scope="module")
def trained(configure, ranks, work, short_rows):
    """The run of a finished training with its export in int4."""
    folder = work / "rounded-serving"
    folder.mkdir()
    data = short_rows(folder / "rows")
    places = ("base", "output", "logs", "export", "evaluation")
    paths = [f"paths.data={data}", f"paths.parity={folder}/parity.json", *(f"paths.{p}={folder / p}" for p in places)]
    keys = ["train.precision=bf16", f"evaluate.parity_rows={ROWS}", "evaluate.rows=8", "evaluate.max_tokens=8"]
    run = configure("qwen3", *paths, *keys, "optimizer.lr=2e-3", "export.quantization=int4")
    run = run.changed(paths={"served": f"{folder}/export/merged", "of_base": f"{folder}/of-base"})
    for command in ("convert", "train", "export"):
        done = ranks(command, run)
        assert done.code == 0, done.output[-3000:]
    return run


def test_vllm_serves_it_and_what_rounding_loses_is_measured_and_limited(trained, evaluate, tmp_path):
    base = {"served": trained.paths.model, "parity": "/nowhere/parity.json", "evaluation": trained.paths.of_base}
    base["of_base"] = "/nowhere"
    done = evaluate(trained.changed(paths=base), tmp_path)
    assert done.code == 0, done.output + done.errors
    done = evaluate(trained, tmp_path)
    assert done.code == 0, done.output + done.errors
    rounded = done.results["parity"]["rounded"]
    assert done.results["parity"]["ok"] and rounded["tokens"] > ROWS and "quantization loses" in done.output
    files = {path.name: path.stat().st_size for path in Path(trained.paths.served).iterdir()}
    limited = trained.changed(export={"max_loss": 1e-9 if rounded["loss"] > 0 else 2 * rounded["loss"]})
    done = evaluate(limited, tmp_path)
    assert done.code == 2 and "export.max_loss: " in done.errors and "the exported files are kept" in done.errors
    assert files == {path.name: path.stat().st_size for path in Path(trained.paths.served).iterdir()}
    assert (Path(trained.paths.evaluation) / "results.json").exists()


@pytest.mark.filterwarnings("ignore")  # of what transformers and compressed-tensors import
def test_transformers_loads_it_with_the_values_of_its_codes(trained):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(trained.paths.served)
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    packed = {name.removesuffix("_packed") for name in tensors if name.endswith("_packed")}
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(packed))}
    plain |= {name: by_library(tensors, name, section) for name in packed}
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expected.load_state_dict(plain, strict=False)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(tokens).logits
        assert torch.equal(found, expected.eval()(tokens).logits)
