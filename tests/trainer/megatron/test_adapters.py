"""trainer/megatron/adapters.py and recipe.py: a LoRA starts as PEFT's and learns as in a plain PEFT loop."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conf.load import dump
from contract import checkpoints
from trainer.data.tickets import tickets
from trainer.weights import torch_dist

ROWS = 16  # all of them in each step, which makes their order meaningless
# Each of these changes the losses of 12 steps by far more than the bound, were it ignored.
RECIPE = ["train.steps=12", "optimizer.lr=2e-2", "optimizer.min_lr=4e-3", "optimizer.warmup_steps=4"]
RECIPE += ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.eps=1e-4", "optimizer.weight_decay=0.5"]
RECIPE += ["optimizer.clip_grad=0.2", "adapter.rank=4", "adapter.alpha=24", "adapter.init=kaiming"]


@pytest.fixture(scope="module")
def rows(work) -> Path:
    folder = work / "sixteen-tickets"
    folder.mkdir()
    found = [json.dumps({"input": ask, "output": team}) + "\n" for ask, team in tickets(ROWS, seed=0).items()]
    (folder / "training.jsonl").write_text("".join(found))
    return folder


@pytest.fixture(scope="module")
def trained(rows, configure, base, ranks, work):
    """trained(kind, name, *overrides) -> its run, metrics, and tensors after step 1, whose learning rate is 0."""

    def trained(kind: str, name: str, *overrides: str) -> SimpleNamespace:
        base(kind)
        folder = work / f"{kind}-{name}"
        paths = {"data": rows, "output": folder, "export": folder / "export", "parity": folder / "parity.json"}
        sizes = [f"train.global_batch={ROWS}", "train.micro_batch=8", "checkpoint.save_every=1", "moe.balance=none"]
        given = [f"paths.{key}={path}" for key, path in paths.items()]
        run = configure(kind, *given, *sizes, "export.checkpoint=1", "export.formats=[adapter]", *RECIPE, *overrides)
        result = ranks("train", run)
        assert result.code == 0, result.output[-3000:]
        stored = torch_dist.open_checkpoint(checkpoints.step_folder(folder / "checkpoints", 1))
        tensors = {key: torch_dist.read(stored, place) for key, place in stored.places.items()}
        steps = [line for line in result.metrics if line["kind"] == "train"]
        return SimpleNamespace(run=run, steps=steps, tensors=tensors)

    return trained


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_each_step_is_that_of_a_plain_peft_loop_from_the_same_adapter(kind, trained, ranks, tmp_path):
    ours = trained(kind, "steps", "train.seed=2")  # with some seeds a route is a tie that rounding decides
    exported = ranks("export", ours.run)
    assert exported.code == 0, exported.output[-3000:]
    adapter = Path(ours.run.paths.export) / "adapter"
    check_distribution(load_file(adapter / "adapter_model.safetensors"), "lora_A", "lora_B")
    dump(ours.run, tmp_path / "run.yaml")
    command = ["tests.support.plain_adapter", tmp_path / "run.yaml", adapter, tmp_path / "found.json"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain = json.loads((tmp_path / "found.json").read_text())
    losses, norms = ([line[key] for line in ours.steps] for key in ("lm_loss", "grad_norm"))
    assert losses == pytest.approx(plain["losses"], abs=2e-5)
    assert norms == pytest.approx(plain["norms"], rel=1e-3)
    assert min(norms) > ours.run.optimizer.clip_grad, "every step is clipped"
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "kind, settings",
    [("llama", "adapter.kind=dora"), ("glm4-moe", "adapter.experts=shared")],
)
def test_every_kind_of_adapter_starts_as_peft_s_does(kind, settings, trained):
    tensors = trained(kind, f"start-{settings}", "train.stop_after=1", *settings.split()).tensors
    check_distribution(weights(tensors), "linear_in", "linear_out")


@pytest.fixture(scope="module")
def alone(trained) -> dict[str, torch.Tensor]:
    found = weights(trained("glm4-moe", "alone", "train.stop_after=1").tensors)
    check_distribution(found, "linear_in", "linear_out")
    return found


@pytest.mark.parametrize("cut", ["tp=2 sp=true ep=2", pytest.param("tp=2 sp=true ep=2 etp=2", marks=pytest.mark.slow)])
def test_an_adapter_starts_alike_at_every_layout(cut, alone, trained):
    world = f"layout.gpus_per_node={4 if 'etp' in cut else 2}"
    there = trained(
        "glm4-moe", cut.replace(" ", "-"), "train.stop_after=1", world, *(f"layout.{p}" for p in cut.split())
    )
    cut_up = weights(there.tensors)
    assert cut_up.keys() == alone.keys()
    assert all(torch.equal(cut_up[name], tensor) for name, tensor in alone.items())


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor for name, tensor in tensors.items() if "linear_in.weight" in name or "linear_out.weight" in name
    }


def check_distribution(tensors: dict[str, torch.Tensor], a: str, b: str) -> None:
    """Check that A is PEFT's: uniform up to 1 / sqrt(inputs), whatever is fused or cut; and that B is 0."""
    drawn = {key: tensor for key, tensor in tensors.items() if a in key}
    assert drawn and all(not tensor.any() for key, tensor in tensors.items() if b in key)
    assert all(tensor.abs().max() <= 1 / math.sqrt(tensor.shape[-1]) for tensor in drawn.values())
    values = torch.cat([(tensor * math.sqrt(tensor.shape[-1])).flatten() for tensor in drawn.values()])
    assert values.abs().max() > 0.999
    assert values.mean().item() == pytest.approx(0, abs=0.02)
    assert values.square().mean().item() == pytest.approx(1 / 3, rel=0.02)
