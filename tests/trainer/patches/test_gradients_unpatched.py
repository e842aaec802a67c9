"""Megatron-Bridge's adapters still need their repairs: with one left out, gradients are not those of one process.

A test that fails here says that upstream has mended something: see whether the patch that it leaves out can go.
"""

import json
from pathlib import Path

import pytest

SP = "layout.tp=2 layout.sp=true"
ETP = f"{SP} layout.etp=2"
DOWN = "linear_q_down_proj,linear_kv_down_proj"
BRIDGE = ("adapter.lean=false",)  # lean adapters need no repair of what tensor-parallel ranks send
EVERY_TOKEN = "sequence_parallel.give_every_adapter_all_tokens"
BOUND = 1e-4


def test_what_a_gathered_norm_s_output_loses_is_seen_in_every_layer_below_the_last(compare):
    """The CPU's stand-in for Transformer Engine drops it as the real one does."""
    found = compare("llama", "lora", SP, False, without=[EVERY_TOKEN], settings=BRIDGE)
    layers = {name.rpartition("@")[2] for name in found["over"]}
    assert layers >= {"0", "1", "2"} and found["gradient"]["difference"] > 0.1, found


@pytest.mark.slow
def test_tokens_that_an_adapter_of_a_whole_layer_mixes_are_seen(compare):
    found = compare("deepseek-v3", "lora", SP, False, targets=DOWN, without=[EVERY_TOKEN], settings=BRIDGE)
    assert found["gradient"]["difference"] > 0.1 and max(found["loss"], found["loss_after"]) > BOUND
    assert compare("deepseek-v3", "lora", SP, False, targets=DOWN, settings=BRIDGE)["over"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, kind, cut, without",
    [
        pytest.param("glm4-moe", "lora", ETP, "expert_adapters.install", id="experts"),
        pytest.param("llama", "dora", "layout.tp=2", "dora.DoRALinear._get_weight_norm", id="norm"),
        pytest.param("llama", "dora", SP, "dora.mark_magnitudes", id="magnitudes"),
    ],
)
def test_without_its_repair_a_gradient_is_wrong(model, kind, cut, without, compare):
    found = compare(model, kind, cut, False, without=[without])
    assert found["gradient"]["difference"] > 0.1 and found["over"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut, without",
    [("layout.ep=2", "expert_adapters.count_once"), (ETP, "expert_adapters.install_shared")],
    ids=["norm", "etp"],
)
def test_an_adapter_that_experts_share_is_another_model_at_another_layout(cut, without, configure, ranks, base, work):
    """What the repaired one is held to: tests/trainer/test_train.py."""
    base("glm4-moe")
    settings = ("adapter.experts=shared", "train.steps=3", "optimizer.clip_grad=0.1", *BRIDGE)
    ways = ("layout.gpus_per_node=2", *cut.split())
    one = ranks("train", configure("glm4-moe", f"paths.output={work}/unpatched-one-{without}", *settings))
    run = configure("glm4-moe", f"paths.output={work}/unpatched-{without}", *settings, *ways)
    Path(run.paths.output).mkdir()
    (Path(run.paths.output) / "request.json").write_text(json.dumps({"without": [without]}))
    many = ranks("train_without", run)
    assert many.code == 0, many.output
    norms = [[line["grad_norm"] for line in done.metrics if line["kind"] == "train"] for done in (one, many)]
    assert any(abs(a - b) > 0.01 * a for a, b in zip(*norms, strict=True)), norms


@pytest.mark.slow
def test_a_module_that_is_recomputed_behind_a_frozen_embedding_gets_no_gradient(compare):
    settings = ("train.recompute=selective", "train.recompute_modules=[moe]")
    options = {"targets": "linear_fc1,linear_fc2", "both": ("adapter.dropout=0",), "settings": settings}
    assert compare("qwen3-moe", "lora", "alone", False, **options)["over"] == []
    found = compare("qwen3-moe", "lora", "alone", False, without=["recompute.start_from_the_embedding"], **options)
    assert found["gradient"]["difference"] > 0.1, found
