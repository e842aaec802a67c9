"""trainer/megatron/frozen_experts.py: one product for all frozen experts, with the numbers of Transformer Engine's."""

import json
from pathlib import Path

import pytest

LINEAR = "adapter.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
SHARED, EACH = "adapter.experts=shared", "adapter.experts=each"


@pytest.fixture
def trained(base, configure, ranks, work):
    """trained(model, frozen, *settings): losses, gradients and counts of a run in fp32."""

    def trained(model: str, frozen: bool, *settings: str) -> dict:
        import torch

        base(model)
        shared = ["train.steps=3", "train.micro_batch=1", "train.global_batch=2", LINEAR]
        folder = work / f"frozen-{frozen}-{model}-{'-'.join(settings)}".replace("/", "")
        run = configure(model, *shared, *settings, f"paths.output={folder}")
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps({"frozen": frozen}))
        result = ranks("frozen_experts", run)
        assert result.code == 0, result.output[-4000:]
        return torch.load(Path(run.paths.output) / "gradients.pt")

    return trained


@pytest.mark.parametrize(
    "model, settings",
    [
        ("gpt-oss", (SHARED,)),  # with biases
        ("glm4-moe", (EACH, "model.base=int4")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("glm4-moe", (SHARED, "train.recompute=full")),
                ("glm4-moe", (EACH, "train.recompute=selective", "train.recompute_modules=[moe_act]")),
                ("qwen3-moe", (SHARED, "layout.gpus_per_node=2", "layout.ep=2")),
            ]
        ),
    ],
)
def test_frozen_experts_are_one_product_with_the_same_losses_and_gradients(model, settings, trained):
    """On one rank their numbers are not asked for; over ranks of experts they are, for the exchange."""
    usual, found = (trained(model, frozen, *settings) for frozen in (False, True))
    assert usual["counts"]["products"] == 0 < found["counts"]["products"]
    assert (found["counts"]["dispatched"] > 0) == ("layout.ep=2" not in settings)
    assert found["losses"] == pytest.approx(usual["losses"], rel=1e-6)
    assert usual["gradients"].keys() == found["gradients"].keys()
    for name, own in usual["gradients"].items():
        assert float((found["gradients"][name] - own).norm()) <= 1e-5 * float(own.norm()), name
