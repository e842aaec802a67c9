"""trainer/training/weight_means.py: the mean of the weights goes on after a kill, at any layout, and is exported."""

import json
from pathlib import Path

import pytest
import torch

from contract import checkpoints
from trainer.weights import torch_dist

KEYS = ["train.ema_decay=0.5", "train.steps=4", "checkpoint.save_every=1", "export.formats=[adapter]"]
NAME = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_out.weight"  # zero before the first step


def weight(run, step: int, mean: bool) -> torch.Tensor:
    folder = checkpoints.step_folder(Path(run.paths.output) / "checkpoints", step)
    stored = torch_dist.open_checkpoint(folder / checkpoints.MEANS if mean else folder)
    return torch_dist.read(stored, stored.places[NAME])


@pytest.fixture(scope="module")
def averaged(configure, base, ranks, work):
    base("llama")
    run = configure("llama", f"paths.output={work}/means", f"paths.parity={work}/means/parity.json", *KEYS)
    result = ranks("train", run)
    assert result.code == 0, result.output
    return run


def test_each_step_adds_its_share(averaged):
    mean = torch.zeros_like(weight(averaged, 1, mean=False))
    for step in range(1, 5):
        kept = min(0.5, (1 + step) / (10 + step))
        mean = kept * mean + (1 - kept) * weight(averaged, step, mean=False)
        assert torch.allclose(weight(averaged, step, mean=True), mean, atol=1e-7)
    assert not torch.allclose(mean, weight(averaged, 4, mean=False), atol=1e-4)


@pytest.mark.parametrize("cut", [[], pytest.param(["layout.gpus_per_node=2", "layout.tp=2"], marks=pytest.mark.slow)])
def test_killed_it_goes_on_with_its_mean_at_any_layout(averaged, configure, ranks, work, cut):
    run = configure("llama", f"paths.output={work}/means-killed-{len(cut)}", *KEYS)
    assert ranks("train", run, kill_at=3).code == -9
    other = configure("llama", f"paths.output={work}/means-killed-{len(cut)}", *KEYS, *cut)
    result = ranks("train", other)
    assert result.code == 0, result.output
    bound = 1e-4 if cut else 0
    assert torch.allclose(weight(other, 4, mean=True), weight(averaged, 4, mean=True), atol=bound, rtol=0)


def test_the_mean_is_exported_and_has_a_record_of_its_own(averaged, configure, ranks, work):
    from safetensors.torch import load_file

    paths = [f"paths.{key}={getattr(averaged.paths, key)}" for key in ("output", "parity")]
    run = configure("llama", *paths, f"paths.export={work}/means-export", "export.weights=ema", *KEYS)
    result = ranks("export", run)
    assert result.code == 0, result.output
    mark = json.loads((work / "means-export" / "complete.json").read_text())
    records = [json.loads((work / "means" / f"parity{which}.json").read_text()) for which in ("-ema", "")]
    assert mark["trained"]["weights"] == records[0]["weights"] != records[1]["weights"]
    assert records[0]["rows"][0]["log_probs"] != records[1]["rows"][0]["log_probs"]
    exported = load_file(work / "means-export" / "adapter" / "adapter_model.safetensors")
    rows = torch.cat([exported[f"base_model.model.model.layers.0.self_attn.{one}_proj.lora_B.weight"] for one in "qkv"])
    assert rows.sum() == pytest.approx(weight(averaged, 4, mean=True).sum().item(), abs=1e-4)
