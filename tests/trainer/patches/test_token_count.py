"""Gradients that are divided by a step's tokens as they are clipped are those that are divided before."""

import pytest

from trainer.patches.gradients import token_count


@pytest.mark.parametrize("keys", ["", "layout.gpus_per_node=2 optimizer.distributed=true"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_losses_and_norms_are_the_same(keys, clip, base, configure, ranks, tmp_path):
    base("llama")
    rows = []
    for command in ("train", "train_dividing_at_the_clip"):
        # With an epsilon as large as gradients, Adam does not make up for a factor that is left out.
        given = [
            "optimizer.eps=1e-3",
            f"optimizer.clip_grad={clip}",
            f"paths.output={tmp_path / command}",
            *keys.split(),
        ]
        done = ranks(command, configure("llama", *given))
        assert not done.code, done.output[-3000:]
        rows.append([line for line in done.metrics if line["kind"] == "train"])
    assert len(rows[0]) > 2
    for one, other in zip(*rows, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "keys, helps",
    [
        ("", True),
        ("train.precision=bf16", True),
        ("train.precision=fp16", False),
        ("optimizer.clip_grad=0", False),
        ("adapter.kind=none optimizer.kind=muon optimizer.distributed=false", False),
    ],
)
def test_it_is_for_optimizers_that_clip(keys, helps, configure):
    assert token_count.helps(configure("llama", *keys.split())) is helps
