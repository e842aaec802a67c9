"""trainer/training/gradients.py: norms of layers add up at any layout, and the noise of gradients is what it is."""

import json
import math

import pytest
import torch

from conf.load import ConfigError, load
from trainer.training.gradient_signal import estimates


def lines(result) -> list[dict]:
    assert result.code == 0, result.output
    return [line for line in result.metrics if line["kind"] == "train"]


@pytest.mark.parametrize("clip", ["0", "1e-3"])
def test_squares_of_the_norms_of_layers_add_up_at_any_layout(configure, ranks, base, work, clip):
    base("llama")
    keys = ["log.layer_norms=true", "train.steps=2", f"optimizer.clip_grad={clip}"]
    alone = lines(ranks("train", configure("llama", f"paths.output={work}/norms-{clip}", *keys)))
    cut = ["layout.gpus_per_node=2", "layout.tp=2", f"paths.output={work}/norms-{clip}-tp"]
    together = lines(ranks("train", configure("llama", *keys, *cut)))
    for line in [*alone, *together]:
        norms = [value for name, value in line.items() if name.startswith(("grad_norm_layer", "grad_norm_others"))]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4) and len(norms) == 5
    names = [name for name in alone[0] if name.startswith("grad_norm_layer")]
    assert [together[0][name] for name in names] == pytest.approx([alone[0][name] for name in names], rel=1e-3)


def test_the_noise_scale_compares_the_first_micro_batch_with_the_batch(configure, ranks, base, work):
    """Each row has as many tokens to learn, so that the first batch of one row is the first micro batch."""
    base("llama")
    rows = work / "noise"
    rows.mkdir()
    for split in ("training", "validation"):
        asked = [{"input": f"{split} {number}", "output": "7"} for number in range(40)]
        (rows / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    keys = [f"paths.data={rows}", "train.micro_batch=1", "train.steps=2", "evaluate.parity_rows=0"]
    one = lines(ranks("train", configure("llama", f"paths.output={work}/noise-1", "train.global_batch=1", *keys)))
    keys += ["train.global_batch=4", "log.noise_scale=true"]
    four = lines(ranks("train", configure("llama", f"paths.output={work}/noise-4", *keys)))
    squared, trace = estimates(one[0]["grad_norm"] ** 2, four[0]["grad_norm"] ** 2, 1, 4)
    tokens = four[0]["noise_scale_tokens"] / (trace / squared)  # of a row
    assert tokens == pytest.approx(round(tokens), rel=1e-3) and 1 <= tokens <= 4


def test_the_noise_scale_is_the_same_where_ranks_have_a_part_each_of_a_norm_s_gradient(configure, ranks, base, work):
    """Norms of heads under tp, and all others under sp: what each rank has is added up when the step is over."""
    base("qwen3")
    keys = ["adapter.kind=none", "train.micro_batch=1", "train.steps=2", "log.noise_scale=true"]
    alone = lines(ranks("train", configure("qwen3", f"paths.output={work}/norms-noise", *keys)))
    cut = ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", f"paths.output={work}/norms-noise-tp"]
    together = lines(ranks("train", configure("qwen3", *keys, *cut)))
    for one, other in zip(alone, together, strict=True):
        assert other["noise_scale_tokens"] == pytest.approx(one["noise_scale_tokens"], rel=1e-4)


def test_estimates_find_a_gradient_and_its_variance_again():
    torch.manual_seed(1)
    gradients = 0.5 + torch.randn(400, 64, 32, dtype=torch.float64)  # 400 batches of 64 tokens, 32 weights
    small = gradients[:, :4].mean(1).square().sum(1).mean().item()
    large = gradients.mean(1).square().sum(1).mean().item()
    squared, trace = estimates(small, large, 4, 64)
    assert squared == pytest.approx(0.25 * 32, rel=0.05) and trace == pytest.approx(32, rel=0.05)


@pytest.mark.parametrize("changes", [["layout.gpus_per_node=2", "layout.pp=2"], ["train.micro_batch=4"]])
def test_a_layout_without_two_micro_batches_to_compare_is_refused(work, changes):
    with pytest.raises(ConfigError, match=r"log\.noise_scale: "):
        load(work / "conf.yaml", ["log.noise_scale=true", *changes])
