"""gpt-oss as it is released is served by vLLM with the weights that training starts from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import logits
from tests.support import drawn_models, mxfp4_release

RANKS = Path(__file__).parents[2] / "support" / "ranks"
ROUNDING = 0.1  # nats a token, of vLLM's bf16; what is found is 0.017


@pytest.mark.slow
def test_a_release_in_mxfp4_is_served_unpacked(configure, tmp_path):
    model, plain = tmp_path / "model", tmp_path / "plain"
    mxfp4_release.make(model)
    plain.mkdir()
    save_file(mxfp4_release.unpacked(model), plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    rows = drawn_models.tokens(rows=2, length=40, vocabulary=500)
    paths = (f"paths.served={model}", f"paths.model={model}", f"paths.kernels={tmp_path}/kernels")
    found = logits.by_vllm(configure("gpt-oss", *paths, "train.precision=bf16"), rows)
    assert not isinstance(found, str), found
    asked = [{"model": str(plain), "adapter": None, "tokens": rows, "out": f"{tmp_path}/logits.pt"}]
    subprocess.run([sys.executable, RANKS / "hf_logits.py"], input=json.dumps(asked), text=True, check=True)
    tokens = torch.tensor(rows)[:, 1:, None]
    of_tokens = torch.load(tmp_path / "logits.pt").log_softmax(-1)[:, :-1].gather(-1, tokens)[..., 0]
    assert float((torch.tensor(found) - of_tokens).abs().mean()) < ROUNDING
