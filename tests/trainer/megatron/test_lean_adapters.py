"""trainer/megatron/lean_adapters.py: only what is of the adapter's rank goes between ranks; values are Bridge's.

tests/trainer/megatron/test_gradients.py compares every gradient at every layout with one process's, which is lean too.
"""

import json
from pathlib import Path

import pytest

SP = "layout.tp=2 layout.sp=true"
BRIDGE = ("adapter.lean=false",)
LAYERS, MICROBATCHES = 4, 2
TOKENS = [[*range(8)], [*range(8, 16)]]
OUTSIDE = 2  # large gathers and scatters of embedding and logits, in each microbatch's forward and backward pass


@pytest.fixture
def counted(base, configure, ranks, work):
    """counted(model, cut, *settings): how often, and bytes, by kind and size, of one step."""

    def counted(model: str, cut: str, *settings: str) -> dict:
        base(model)
        shared = ["layout.gpus_per_node=2", *cut.split(), "train.steps=2", "train.micro_batch=1"]
        shared += [f"train.global_batch={MICROBATCHES * (1 if 'tp=2' in cut else 2)}", "data.seq_length=128"]
        run = configure(model, *shared, *settings, f"paths.output={work / '-'.join(['counted', model, *settings])}")
        Path(run.paths.output).mkdir(exist_ok=True)
        result = ranks("collectives", run)
        assert result.code == 0, result.output[-4000:]
        return json.loads((Path(run.paths.output) / "answer.json").read_text())

    return counted


def test_only_what_is_of_the_adapter_s_rank_goes_between_tensor_parallel_ranks(counted):
    """Four small collectives for each of a layer's pairs of layers, and the base model's own large ones."""
    found = counted("llama", SP)["counts"]
    each = LAYERS * MICROBATCHES
    assert found["allgather_base small"] == found["reduce_scatter_base small"] == 4 * each
    assert found["allgather_base large"] == found["reduce_scatter_base large"] == 4 * each + OUTSIDE
    assert found["allreduce large"] == 1  # gradients of whole matrices, once a step


@pytest.mark.slow
def test_bridge_s_layers_send_activations(counted):
    """What is left out: 14 large gathers and scatters a layer and microbatch less, of 16."""
    lean, bridge = counted("llama", SP)["bytes"], counted("llama", SP, *BRIDGE)["bytes"]
    assert sum(bridge.values()) > 1.7 * sum(lean.values())


@pytest.mark.slow
def test_gradients_of_an_adapter_that_experts_share_are_summed_once_a_step(counted):
    shared = "adapter.experts=shared"
    lean, bridge = (counted("glm4-moe", "layout.ep=2", shared, *more)["counts"] for more in ((), BRIDGE))
    routed = 3  # layers, each with A and B of fc1 and of fc2
    assert sum(bridge.values()) - sum(lean.values()) == 4 * routed * MICROBATCHES - 1


@pytest.mark.parametrize(
    "model, cut, packed, both",
    [
        ("llama", SP, True, ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama", "alone", False, ()),
                ("llama", "layout.tp=2", False, ()),
                ("llama", "layout.pp=2", True, ()),
                ("glm4-moe", f"{SP} layout.ep=2", False, ()),
                ("glm4-moe", f"{SP} layout.etp=2", False, ()),
                ("glm4-moe", "layout.cp=2", True, ()),
                ("glm4-moe", f"{SP} layout.ep=2", True, ("train.recompute=full",)),
                ("glm4-moe", SP, False, ("train.recompute=selective", "train.recompute_modules=[moe_act,layernorm]")),
                ("deepseek-v3", SP, True, ()),
            ]
        ),
    ],
)
def test_bridge_s_layers_have_the_same_gradients_and_losses(model, cut, packed, both, compare):
    """Both are held to one process with lean adapters: ranks with them, and ranks with Bridge's."""
    for settings in ((), BRIDGE):
        found = compare(model, "lora", cut, packed, settings=settings, both=both)
        assert found["over"] == [] and found["loss"] <= 1e-5 and found["same_routes"], (settings, found)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["layout.ep=2", f"{SP} layout.ep=2", f"{SP} layout.etp=2"])
def test_an_adapter_that_experts_share_learns_as_bridge_s_does(cut, configure, ranks, base, work):
    """Norms too: all gradients are clipped by theirs."""
    base("glm4-moe")
    shared = ("adapter.experts=shared", "train.steps=4", "optimizer.clip_grad=0.1")
    found = []
    for name, more in (("one", ()), ("lean", cut.split()), ("bridge", [*cut.split(), *BRIDGE])):
        ways = ["layout.gpus_per_node=2", *more] if more else []
        run = configure("glm4-moe", *shared, *ways, f"paths.output={work}/shared-{name}-{cut.replace(' ', '-')}")
        done = ranks("train", run)
        assert done.code == 0, done.output[-3000:]
        found.append(
            [line[key] for line in done.metrics if line["kind"] == "train" for key in ("lm_loss", "grad_norm")]
        )
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, cut",
    [("glm4-moe", SP), ("llama", "layout.tp=2"), ("deepseek-v3", SP), ("glm4-moe", f"{SP} layout.etp=2")],
)
def test_bridge_merges_them_from_ranks_as_from_one_process(model, cut, configure, base, megatron_logits, tmp_path):
    """What vLLM is sent of a model that is trained, by Bridge's own export."""
    base(model)
    alone, ranks = configure(model), configure(model, "layout.gpus_per_node=2", *cut.split())
    drawn = str(tmp_path / "drawn")
    expected = megatron_logits(alone, tokens=TOKENS, invent=drawn)["weights"]
    found = megatron_logits(ranks, tokens=TOKENS, checkpoint=drawn)["weights"]
    untrained = megatron_logits(alone, tokens=TOKENS)["weights"]
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name
    assert sum(bool((expected[name] != weight).any()) for name, weight in untrained.items()) > 4


def test_adapters_of_each_expert_are_one_product_where_all_have_tokens(configure, ranks, tmp_path):
    result = ranks("grouped_experts", configure("llama", f"paths.output={tmp_path}"))
    assert result.code == 0, result.output[-3000:]
    found = json.loads((tmp_path / "answer.json").read_text())
    assert max(found["apart"]) < 1e-2, found  # bf16
    assert found["fits"] == {"all": False, "gpu": True, "one without": False}
