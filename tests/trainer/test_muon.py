"""optimizer.kind muon: orthogonal updates of matrices, the same at any layout, gone on with after a kill."""

import functools
from pathlib import Path

import pytest
import torch

from contract import checkpoints
from trainer.weights import torch_dist

KEYS = ["adapter.kind=none", "optimizer.distributed=false", "optimizer.weight_decay=0", "optimizer.lr=1e-3"]
KEYS += ["train.steps=3", "checkpoint.save_every=1"]
MUON = [*KEYS, "optimizer.kind=muon"]
MATRIX, NORM = "decoder.layers.1.self_attention.linear_proj.weight", "decoder.final_layernorm.weight"


def losses(result) -> list[float]:
    assert result.code == 0, result.output
    return [line["lm_loss"] for line in result.metrics if line["kind"] == "train"]


def update(run, name: str) -> torch.Tensor:
    """How the second step changes a weight."""
    folder = Path(run.paths.output) / "checkpoints"
    stored = [torch_dist.open_checkpoint(checkpoints.step_folder(folder, step)) for step in (1, 2)]
    before, after = (torch_dist.read(one, one.places[name]).float() for one in stored)
    return after - before


@pytest.fixture(scope="module")
def trained(configure, base, ranks, work):
    """trained(name, *overrides, kind="llama") -> run, result; the same is trained once."""

    @functools.cache
    def trained(name: str, *overrides: str, kind: str = "llama"):
        base(kind)
        run = configure(kind, f"paths.output={work}/{name}", *overrides)
        return run, ranks("train", run)

    return trained


def test_matrices_get_orthogonal_updates_and_others_adamws(trained):
    """What a step's few tokens say of a matrix is of low rank: the first quarter of the singular values."""
    muon, adamw = trained("muon", *MUON), trained("adamw", *KEYS)
    assert losses(muon[1])[0] == losses(adamw[1])[0] and losses(muon[1])[2] != losses(adamw[1])[2]
    changed, usual = (torch.linalg.svdvals(update(run, MATRIX)) for run, _ in (muon, adamw))
    quarter = len(changed) // 4
    assert changed[0] / changed[quarter] < 1.5 and usual[0] / usual[quarter] > 5
    rate = next(line["lr"] for line in muon[1].metrics if line["kind"] == "train")  # that of the second step
    assert changed[0].item() == pytest.approx(rate * 0.2 * len(changed) ** 0.5, rel=0.3)
    norms = update(muon[0], NORM).abs()  # of AdamW, each number moves by up to the rate
    assert norms.max().item() == pytest.approx(rate, rel=0.1) and norms.median().item() > rate / 10


def test_killed_it_goes_on_and_another_layout_takes_the_same_steps(trained, configure, ranks, work):
    _, whole = trained("muon", *MUON)
    run = configure("llama", f"paths.output={work}/muon-killed", *MUON)
    assert ranks("train", run, kill_at=2).code == -9
    assert losses(ranks("train", run)) == losses(whole)
    _, cut = trained("muon-cut", *MUON, "layout.gpus_per_node=2", "layout.tp=2")
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["ep=2", "tp=2 layout.sp=true layout.ep=2", "pp=2"])
def test_experts_take_the_same_steps_wherever_they_are(cut, trained):
    _, whole = trained("muon-experts", *MUON, kind="glm4-moe")
    name = "muon-experts-" + cut[:4].replace("=", "")
    _, shared = trained(name, *MUON, "layout.gpus_per_node=2", *f"layout.{cut}".split(), kind="glm4-moe")
    assert losses(shared) == pytest.approx(losses(whole), abs=1e-4)
