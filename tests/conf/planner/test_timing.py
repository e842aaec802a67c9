"""conf/planner/timing.py: FLOPs by hand, what may never get slower or cheaper, and measured steps."""

from dataclasses import replace
from math import inf

import pytest

from conf.load import load
from conf.planner.hardware import GPUS, LINK, NETWORK, priced
from conf.planner.timing import timing
from conf.planner.traffic import gathered
from tests.support.known_models import known

H200 = GPUS["h200"]
ALONE = {f"layout.{key}": 1 for key in ("nodes", "gpus_per_node", "tp", "pp", "ep", "etp")}
ALONE |= {"layout.sp": "false", "layout.vpp": "null"}
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
    assert found.hours and found.low < found.likely < found.high and found.cost == pytest.approx(3.5 * found.hours)
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


# Steps of trainer.trial, 24 November 2026: docs/measurements/plans.md. Plans are within 15 %.
PACKED = "qwen3-30b-a3b-1xh100"
PACKS_4096 = "moe.force_balance=true data.seq_length=4096 train.global_batch=16"
PACKS_2048 = "moe.force_balance=true data.seq_length=2048 train.global_batch=32"
PACKS_512 = "moe.force_balance=true data.seq_length=512 train.global_batch=128"
SLICE = "data.seq_length=8192 train.global_batch=8 model.mtp=false adapter.dropout=0 data.packed=false"
SLICE = f"moe.force_balance=true {SLICE} {' '.join(f'{key}={value}' for key, value in ALONE.items())}"
GPT2 = "train.recompute=none"
GPT2_TWO = f"{GPT2} optimizer.distributed=true layout.gpus_per_node=2 train.global_batch=64"


@pytest.mark.parametrize(
    "name, model, layers, gpu, keys, measured",
    [
        ("gpt2-large", "gpt2-large", 36, "h200", GPT2, 0.349),
        ("gpt2-large", "gpt2-large", 36, "h200", f"{GPT2} train.fp8=delayed", 0.277),
        ("gpt2-large", "gpt2-large", 36, "h200", GPT2_TWO, 0.345),
        ("gpt2-large", "gpt2-large", 36, "h200", f"{GPT2_TWO} layout.tp=2 train.micro_batch=64", 0.423),
        ("gpt2-large", "gpt2-large", 36, "h200", f"{GPT2_TWO} layout.tp=2 layout.sp=true train.micro_batch=64", 0.436),
        (
            "gpt2-large",
            "gpt2-large",
            36,
            "h200",
            f"{GPT2_TWO} layout.tp=2 layout.sp=true train.micro_batch=64 train.overlap_tp=true",
            0.401,
        ),
        ("gpt2-large", "gpt2-large", 36, "h200", f"{GPT2_TWO} layout.cp=2 train.micro_batch=64", 0.458),
        (
            "gpt2-large",
            "gpt2-large",
            36,
            "h200",
            f"{GPT2_TWO} layout.pp=2 layout.vpp=4 layout.last_stage_layers=16 train.micro_batch=16",
            0.441,
        ),
        (
            "glm47",
            "glm47",
            6,
            "h200",
            f"{SLICE} train.recompute=selective train.recompute_modules=[moe_act,layernorm]",
            2.237,
        ),
        ("glm47", "glm47", 6, "h200", f"{SLICE} train.recompute=none train.micro_batch=2", 2.109),
        ("glm47", "glm47", 6, "h200", f"{SLICE} train.recompute=none train.micro_batch=4", 2.033),
        ("glm47-2xh200", "glm47", 92, "h200", "train.global_batch=4 moe.force_balance=true", 6.93),
        ("qwen3-30b-a3b-1xh200", "qwen3-30b-a3b", 8, "h200", "train.micro_batch=1 moe.force_balance=true", 1.057),
        (
            "qwen3-30b-a3b-1xh100",
            "qwen3-30b-a3b",
            48,
            "h100",
            "data.seq_length=8192 train.global_batch=4 train.micro_batch=1 moe.force_balance=true",
            3.900,
        ),
        (PACKED, "qwen3-30b-a3b", 48, "h200", "moe.force_balance=true", 5.687),
        (PACKED, "qwen3-30b-a3b", 48, "h200", f"{PACKS_4096} train.micro_batch=4", 4.872),
        (PACKED, "qwen3-30b-a3b", 48, "h200", f"{PACKS_2048} train.micro_batch=8", 4.393),
        (PACKED, "qwen3-30b-a3b", 48, "h200", f"{PACKS_512} train.micro_batch=32", 4.127),
        (
            "qwen3-next-80b-4xh100",
            "qwen3-next-80b",
            16,
            "h100",
            "layout.gpus_per_node=1 layout.ep=1 train.global_batch=4 train.micro_batch=1 moe.force_balance=true",
            2.026,
        ),
        ("qwen35-35b-1xh100", "qwen35-35b-a3b", 40, "h200", "moe.force_balance=true train.recompute_first=null", 7.163),
        ("gemma4-26b-1xh100", "gemma4-26b", 30, "h200", "moe.force_balance=true train.recompute_first=22", 6.561),
        ("gemma3-12b-1xl40s", "gemma3-12b", 48, "h200", "hardware.gpu=h200 train.recompute_first=null", 9.919),
        (
            "qwen35-35b-1xh100",
            "qwen35-35b-a3b",
            40,
            "h100",
            "data.packed=false data.seq_length=4096 train.global_batch=6 train.micro_batch=6 moe.force_balance=true"
            " train.recompute_first=null",
            2.167,
        ),
        (
            "qwen35-35b-1xh100",
            "qwen35-35b-a3b",
            40,
            "h100",
            "model.base=int4 data.packed=false data.seq_length=4096 train.global_batch=8 train.micro_batch=8"
            " moe.force_balance=true train.recompute_first=null",
            2.781,
        ),
    ],
)
def test_measured_steps(name, model, layers, gpu, keys, measured):
    run, facts = load(name, keys.split()), known(model)
    if layers != facts.layers:
        facts = replace(facts, layers=layers, dense_layers=min(facts.dense_layers, 1), mtp_layers=0)
    assert timing(run, facts, GPUS[gpu]).likely == pytest.approx(measured, rel=0.15)


# Steps of trainer.trial on H200s. Bare Megatron-Bridge took longer for these: 0.509 s, 5.337 s and 1.010 s.
def test_trials_that_were_faster_than_bare_bridge():
    gpt2 = {"data__seq_length": 1024, "train__micro_batch": 32, "train__global_batch": 32}
    facts = known("gpt2-large")
    assert timing(alone(**gpt2, train__fp8="current"), facts, H200).likely == pytest.approx(0.330, rel=0.25)
    two = {"layout__gpus_per_node": 2, "layout__pp": 2, "train__micro_batch": 8, "train__global_batch": 64}
    assert timing(alone(**gpt2 | two), facts, H200).likely == pytest.approx(0.589, rel=0.25)
    facts = replace(known("glm47"), layers=6, dense_layers=1, mtp_layers=0)
    lora = {"adapter__kind": "lora", "train__recompute": "full", "moe__force_balance": True, "train__global_batch": 8}
    low, high = (timing(alone(**lora, train__fp8=fp8), facts, H200).likely for fp8 in ("blockwise", "null"))
    assert low == pytest.approx(3.631, rel=0.25) and low > high


# The same, with all weights trained unless it says lora, two sequences a step, on layers of the real width.
@pytest.mark.parametrize(
    "name, layers, changes, measured",
    [
        ("llama31-70b", 3, {"data__seq_length": 8192}, 0.718),
        ("llama31-70b", 12, {"adapter__kind": "lora", "adapter__dropout": 0, "data__seq_length": 8192}, 1.485),
        ("glm47", 2, {"data__seq_length": 4096, "moe__force_balance": True}, 0.311),
        ("qwen3-235b", 2, {"data__seq_length": 4096, "moe__force_balance": True}, 0.298),
    ],
)
def test_measured_trials(name, layers, changes, measured):
    facts = replace(known(name), layers=layers, mtp_layers=0)
    facts = replace(facts, dense_layers=0 if name == "qwen3-235b" else 1 if facts.experts else layers)
    made = alone(**changes, train__global_batch=2)
    assert timing(made, facts, H200).likely == pytest.approx(measured, rel=0.25)


# The same on four GPUs of one host, LoRA unless it says full. Small pieces of work wait there for all ranks' hosts.
AIR = {"data__seq_length": 8192, "adapter__rank": 128, "train__global_batch": 8}
AIR |= {"train__recompute": "selective", "train__recompute_modules": "[moe_act,layernorm]"}
LLAMA = {"data__seq_length": 4096, "train__global_batch": 8, "layout__tp": 4, "layout__sp": True}
QWEN = {"data__seq_length": 4096, "adapter__rank": 32, "train__global_batch": 8}


@pytest.mark.parametrize(
    "name, layers, changes, measured",
    [
        ("glm47", 20, AIR | {"layout__ep": 4}, 2.129),
        ("glm47", 20, AIR | {"layout__pp": 2, "layout__ep": 2, "train__global_batch": 16}, 4.910),
        ("glm45-air", 12, AIR | {"layout__ep": 4}, 1.120),
        ("glm45-air", 12, AIR | {"layout__ep": 4, "layout__tp": 2, "layout__sp": True}, 1.850),
        ("glm45-air", 46, AIR | {"layout__ep": 4, "layout__tp": 2, "layout__sp": True}, 7.951),
        ("glm45-air", 12, AIR | {"layout__ep": 4, "layout__cp": 4}, 3.600),
        ("llama31-70b", 16, LLAMA, 1.530),
        ("llama31-70b", 80, LLAMA, 7.649),
        ("llama31-70b", 16, LLAMA | {"adapter__kind": "none"}, 1.667),
        ("qwen3-235b", 12, QWEN | {"layout__ep": 4}, 0.800),
    ],
)
def test_measured_steps_on_four_gpus(name, layers, changes, measured):
    facts = replace(known(name), layers=layers, mtp_layers=0)
    facts = replace(facts, dense_layers=layers if not facts.experts else min(facts.dense_layers, 1))
    lora = {"adapter__kind": "lora", "adapter__dropout": 0, "moe__force_balance": True}
    lora |= {"adapter__lean": False}  # as they were then: a product for each expert
    made = alone(layout__gpus_per_node=4, **lora | changes)
    assert timing(made, facts, H200).likely == pytest.approx(measured, rel=0.21)


def test_a_rank_that_shares_its_host_waits_longer_for_it():
    """With little work for each kernel, a step takes longer the more ranks and collectives there are."""
    facts = replace(known("glm45-air"), layers=12, mtp_layers=0)
    small = {"adapter__kind": "lora", "data__seq_length": 512, "moe__force_balance": True}
    one = timing(alone(train__global_batch=1, **small), facts, H200).likely
    four = timing(alone(train__global_batch=4, layout__gpus_per_node=4, layout__ep=4, **small), facts, H200).likely
    tp = {"layout__gpus_per_node": 4, "layout__ep": 4, "layout__tp": 4, "layout__sp": True}
    cut = timing(alone(train__global_batch=1, **tp, **small), facts, H200).likely
    assert one < four < cut


def test_fp8_computes_no_less_and_large_products_sooner():
    facts = known("llama31-70b")
    high, low = (timing(alone(train__fp8=fp8), facts, H200) for fp8 in ("null", "current"))
    assert low.flops == high.flops and 0.5 * high.likely < low.likely < 0.9 * high.likely


def test_fp16_takes_as_long_as_bf16():
    facts = known("gpt2-large")
    times = [
        timing(alone(train__precision=kind, data__seq_length=1024), facts, H200).likely for kind in ("fp16", "bf16")
    ]
    assert times[0] == times[1]


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
