"""conf/rules/layout.py: the two grids, what each rule says, and that the values it offers are legal."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from conf.load import load
from conf.model_facts import MODELS, facts_from_hf
from conf.rules.layout import Grid, grid, problems
from conf.schema.run import Run, sections
from tests.support.drawn_models import pair

GLM = {
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK = GLM | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
}
QWEN3_MOE = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MIXTRAL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "intermediate_size": 11008,
}

LATENT = DEEPSEEK | {
    "q_lora_rank": 100,
    "kv_lora_rank": 50,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 99,
    "n_positions": 1024,
}
GPT_OSS = json.loads((MODELS / "gpt-oss-20b.json").read_text())["config"]
NEXT = json.loads((MODELS / "qwen3-next-80b.json").read_text())["config"]

# 7B v0.1
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000}
MISTRAL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096}


def run(world: int = 8, **changes: object) -> Run:
    """A run on nodes of 8; each of `changes` goes to the first section with such a key, dropout to the adapter's."""
    data: dict[str, dict[str, object]] = {
        "model": {"source": "x"},
        "data": {"seq_length": 4096},
        "adapter": {"rank": 64},
        "layout": {"nodes": max(1, world // 8), "gpus_per_node": min(world, 8)},
        "train": {"steps": 10, "global_batch": 2 * world, "recompute": "full"},
        "optimizer": {"lr": 1e-4},
        "checkpoint": {"save_every": 5},
    }
    for key, value in changes.items():
        named = (name for name, kind in sections().items() if key in kind.model_fields)
        section = "adapter" if key == "dropout" else next(named)
        data.setdefault(section, {})[key] = value
    return Run.model_validate({"name": "x", **data})


def test_the_expert_grid_is_not_the_dense_grid():
    glm47 = load("glm47-as-documented")
    assert grid(glm47.layout, glm47.train) == Grid(dp=16, edp=2, microbatches=1)
    assert problems(glm47, facts_from_hf(GLM)) == []


LEGAL = [
    (NEXT, run(16, tp=8, cp=2, sp=True)),
    (NEXT, run(8, tp=2, sp=True, lean=False, targets=["linear_qkv"])),
    (GLM, run(32, tp=2, ep=8, etp=2, sp=True)),
    (GLM, run(32, tp=2, pp=4, ep=4, sp=True, global_batch=8)),
    (GLM, run(8, pp=2, vpp=2, ep=4, global_batch=8)),
    (GLM, run(8, pp=2, packed=True)),
    (GLM, run(8, cp=4, tp=2, sp=True)),
    (DEEPSEEK, run(64, pp=16, ep=4, first_stage_layers=3, last_stage_layers=2, global_batch=64)),
    (QWEN3_MOE, run(32, tp=4, pp=8, ep=4, sp=True, first_stage_layers=5, last_stage_layers=5)),
    (QWEN3_MOE, run(8, tp=8, sp=True)),  # more tensor ranks than key-value heads
    (MIXTRAL, run(16, tp=2, pp=2, ep=4, etp=2, sp=True)),
    (LLAMA, run(8, tp=8)),
    (LATENT, run(8, tp=4, sp=True, rank=64)),  # targets that the model has not are of no account
    (GPT_OSS, run(8, tp=2, ep=4, pp=2, sp=True)),
    (GPT2, run(8, tp=4, rank=64, seq_length=512)),  # its vocabulary is padded
    (GLM, run(8, tp=2, etp=2, sp=True, kind="dora", grouped_gemm=False)),
]


@pytest.mark.parametrize("config, legal", LEGAL)
def test_legal_layouts(config, legal):
    assert problems(legal, facts_from_hf(config)) == []


# Broken by the configuration alone.
ALONE = [
    (run(32, tp=3), "layout.tp: 3 does not divide the 32 processes (4 nodes x 8); nearest legal: 2, 4"),
    (run(8, pp=3), "layout.pp: 3 does not divide"),
    (run(8, ep=5), "layout.ep: 5 does not divide the 8 processes (1 nodes x 8); nearest legal: 4, 8"),
    (run(8, tp=2, pp=4, cp=2), "layout.pp: tp 2 * cp 2 * pp 4 = 16 does not divide the 8 processes"),
    (run(64, pp=16, ep=32), "layout.ep: etp 1 * ep 32 * pp 16 = 512 does not divide the 64 processes"),
    (run(32, tp=4, pp=8, ep=4, etp=4, sp=True), "layout.pp: etp 4 * ep 4 * pp 8 = 128 does not divide the 32"),
    (
        run(8, global_batch=12),
        "train.global_batch: 12 is not a multiple of micro_batch 1 * dp 8 = 8; nearest legal: 8, 16",
    ),
    (
        run(8, global_batch=3),
        "train.global_batch: 3 is not a multiple of micro_batch 1 * dp 8 = 8; nearest legal: 8, 16",
    ),
    (
        run(8, pp=4, vpp=2, global_batch=6),
        "train.global_batch: 6 is 3 microbatches, but with vpp it must be a multiple of pp 4; nea",
    ),
    (run(8, sp=True), "layout.sp: true, but it needs tp above 1, and tp is 1; nearest legal: false"),
    (run(8, tp=2, ep=2), "layout.sp: false, but experts with tp 2 need it; nearest legal: true"),
    (
        run(8, cp=4, seq_length=4100),
        "data.seq_length: 4100 is not a multiple of 8: cp 4, tp 1, sp false; nearest legal: 4096",
    ),
    (run(8, tp=4, sp=True, seq_length=4098), "data.seq_length: 4098 is not a multiple of 4"),
    (run(8, cp=2, tp=4, sp=True, seq_length=4100), "data.seq_length: 4100 is not a multiple of 8"),
    (run(8, vpp=2), "layout.vpp: 2 stages per pipeline rank need pp > 1"),
    (run(8, last_stage_layers=2), "layout.last_stage_layers: 2 needs pp > 1"),
]
# Broken on this model only.
OF_MODEL = [
    (GLM, run(8, tp=2), "layout.sp: false, but experts with tp 2 need it"),
    (
        GLM,
        run(36, gpus_per_node=9, tp=9, sp=True, seq_length=4608),
        "layout.tp: 9 does not divide the attention heads, 96",
    ),
    (
        GLM,
        run(48, tp=12, sp=True, seq_length=12288),
        "layout.tp: 12 is neither divisor nor multiple of the 8 key-value",
    ),
    (GLM, run(24, gpus_per_node=3, nodes=8, ep=3), "layout.ep: 3 does not divide the 160 experts; nearest legal: 2, 4"),
    (GLM, run(48, etp=16, ep=3), "layout.ep: 3 does not divide the 160 experts"),
    (
        GLM,
        run(48, etp=48, rank=48),
        "layout.etp: 48 does not divide the hidden size, the output of experts' adapters, 5120",
    ),
    (GLM, run(8, tp=8, sp=True, rank=4), "layout.tp: 8 does not divide the adapter.rank, 4; nearest legal: 2, 4"),
    (
        GLM,
        run(8, pp=8),
        "layout.pp: 8 ranks do not share 92 layers evenly; nearest legal: 2, 4; or layout.last_stage_layers 8",
    ),
    (
        GLM,
        run(8, pp=2, vpp=3),
        "layout.vpp: 3 does not divide the layers of each pipeline rank, 46; nearest legal: 2, 23",
    ),
    (DEEPSEEK, run(8, pp=4, first_stage_layers=14), "layout.first_stage_layers: first 14 and last even do not add up"),
    (
        DEEPSEEK,
        run(8, pp=2, first_stage_layers=30, last_stage_layers=30),
        "layout.first_stage_layers: first 30 and last",
    ),
    (DEEPSEEK, run(8, pp=2, last_stage_layers=61), "layout.last_stage_layers: first even and last 61 do not add up"),
    (GLM, run(8, recompute_layers=2), "train.recompute_layers: 2, but multi-token-prediction layers"),
    (GLM, run(8, kind="dora"), "adapter.kind: dora fits no grouped experts"),
    (LLAMA, run(8, ep=2), "layout.ep: 2, but the model has no experts; nearest legal: 1"),
    (LLAMA, run(8, etp=2), "layout.etp: 2, but the model has no experts; nearest legal: 1"),
]
OF_MODEL += [
    (
        NEXT,
        run(8, base="nvfp4"),
        "model.base: nvfp4, but projections of gated delta nets, which are one matrix here, would share a factor; "
        "nearest legal: fp8",
    ),
    (
        NEXT | {"num_nextn_predict_layers": 1, "tie_word_embeddings": True},
        run(8, pp=2),
        "layout.pp: 2, but core cannot save a tied output layer on a stage with multi-token prediction; nearest legal:",
    ),
    (
        LATENT,
        run(8, tp=8, sp=True, targets=["linear_q_down_proj"]),
        "layout.tp: 8 does not divide the width of the low-",
    ),
    (
        LATENT,
        run(8, tp=8, sp=True, targets=["linear_kv_down_proj"]),
        "layout.tp: 8 does not divide the width of the low",
    ),
    (LATENT, run(12, gpus_per_node=12, cp=3, seq_length=4104), "layout.cp: 3 does not cut the 4096 rotations of lat"),
    (
        LATENT,
        run(8, tp=2, sp=True, kind="dora", targets=["linear_kv_down_proj"]),
        "adapter.kind: dora fits no linear_kv_",
    ),
    (
        GLM | {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 4},
        run(16, gpus_per_node=16, tp=16, sp=True),
        "layout.tp: 16 doe",
    ),
    (
        GLM,
        run(8, tp=2, etp=4, sp=True, kind="dora", grouped_gemm=False),
        "layout.etp: 4, but dora cuts the adapters of",
    ),
    (LLAMA, run(8, tp=2, sp=True, kind="dora", dropout=0.1), "adapter.dropout: 0.1, but dora under sp takes none"),
    (
        GLM,
        run(8, ep=2, kind="dora", grouped_gemm=False),
        "layout.ep: 2, but dora trains experts wrongly over ep; nearest legal: 1; or adapter.targets [li",
    ),
    (
        GLM,
        run(8, pp=2, vpp=2, first_stage_layers=46, last_stage_layers=46),
        "layout.vpp: 2, but core divides by the number of stages between the first and the last, which is 0; near",
    ),
    (
        GLM,
        run(8, dispatcher="flex"),
        "moe.dispatcher: flex needs experts spread over ranks, and ep 1 * etp 1 is 1; nea",
    ),
    (
        GLM,
        run(8, recompute="selective", recompute_modules=["mla_up_proj"]),
        "train.recompute_modules: mla_up_proj is no",
    ),
    (GPT_OSS, run(8, tp=2, etp=2, sp=True), "layout.etp: 2, but experts with biases are whole on a rank; nearest"),
    (GPT_OSS, run(8, cp=2), "layout.cp: 2, but keys that pass through a ring of ranks meet neither sinks nor wi"),
    (MISTRAL, run(8, cp=2), "layout.cp: 2, but keys that pass through a ring of ranks meet neither sinks nor wi"),
    (GPT_OSS, run(8, grouped_gemm=False), "moe.grouped_gemm: false, but experts with biases were tried only in gro"),
    (NEXT, run(64, tp=8, cp=4, sp=True), "layout.cp: 4, but tp * cp does not divide the 16 key heads of gated delta "),
    (NEXT, run(8, tp=2, sp=True, lean=False, targets="all-linear"), "layout.tp: 2, but the adapter of in_proj can be"),
    (GPT2, run(8), "data.seq_length: 4096, but the model has learned 1024 positions; nearest legal: 1024"),
]
EVERYWHERE = [(None, broken, line) for broken, line in ALONE]


@pytest.mark.parametrize("config, broken, line", EVERYWHERE + OF_MODEL)
def test_illegal_layouts(config, broken, line):
    found = problems(broken, facts_from_hf(config) if config else None)
    assert any(each.startswith(line) for each in found), found


@pytest.mark.parametrize("config, broken, line", EVERYWHERE + OF_MODEL)
def test_values_offered_mend_what_they_are_offered_for(config, broken, line):
    facts = facts_from_hf(config) if config else None
    before = problems(broken, facts)
    for problem in before:
        for values in offered(problem):
            assert len(problems(changed(broken, values), facts)) < len(before), (problem, values)


def changed(run: Run, values: dict[str, Any]) -> Run:
    data = run.model_dump()
    for key, value in values.items():
        section, _, name = key.partition(".")
        data[section][name] = value
    return Run.model_validate(data, strict=False)


def offered(problem: str) -> Iterator[dict[str, Any]]:
    """Values by key, as the line has them."""
    own, _, rest = problem.partition("; nearest legal: ")[2].partition("; or ")
    for value in yaml.safe_load(f"[{own}]"):
        yield {problem.partition(":")[0]: value}
    for other in filter(None, (rest or problem.partition("; legal with ")[2]).split(" or ")):
        pairs = (pair.partition(" ") for pair in other.split(" and "))
        yield {key: yaml.safe_load(text) for key, _, text in pairs}


@pytest.mark.parametrize("hundred", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_values_offered_mend_any_layout(hundred):
    """No value that is offered breaks a rule that held, and what it was offered for holds."""
    seen = without = 0
    for seed in range(300 * hundred, 300 * hundred + 300):
        config, drawn = pair(seed)
        facts = facts_from_hf(config)
        found = problems(drawn, facts)
        assert [line.partition("; ")[0] for line in found] == [
            line.partition("; ")[0] for line in problems(drawn, facts, suggest=False)
        ]
        for problem in found:
            for values in offered(problem):
                after = problems(changed(drawn, values), facts, suggest=False)
                assert problem.partition("; ")[0] not in after and len(after) < len(found), (seed, problem, after)
                seen += 1
        without += sum("legal" not in problem for problem in found)
    assert seen > 300 and without < 50


def test_model_rules_wait_for_the_model():
    for config, broken, _ in OF_MODEL:
        assert problems(broken, facts_from_hf(config)) and not problems(broken)


def test_grid_refuses_to_round():
    with pytest.raises(AssertionError, match="illegal layout"):
        grid(run(8, tp=3).layout, run(8).train)
