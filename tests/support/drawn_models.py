"""Inputs that tests draw: rows of tokens, and models and layouts, small, of every family, about half of them legal."""

import random
from math import lcm
from typing import Any

from conf.schema.run import Run
from trainer.rehearsal.tiny_models import KINDS

QWEN2_MOE = KINDS["qwen2-moe"] | {"decoder_sparse_step": 2, "mlp_only_layers": []}
# Which seeds do not draw.
OTHERS = ("glm4-moe-lite", "kimi-k2", "olmoe", "minimax-m2", "qwen2", "mistral", "gpt-oss", "qwen3-5", "qwen3-5-moe")
OTHERS += ("nemotron-h", "nemotron-h-latent", "nemotron-h-mtp")
OTHERS += ("gemma3-text", "gemma3", "gemma4-text", "gemma4", "qwen3-next-mtp", "qwen3-5-mtp", "qwen3-5-moe-mtp")
MODELS: dict[str, dict[str, Any]] = {kind: config for kind, config in KINDS.items() if kind not in OTHERS}
MODELS["qwen2-moe"] = QWEN2_MOE
MLA = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
MODULES = ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
UNTIED = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")  # whatever their config.json says


def tokens(rows: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Rows that differ from one another, of tokens that differ: on copies of one token most functions look alike."""
    rng = random.Random(seed)
    found = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)]
    assert len({tuple(row) for row in found}) == rows
    assert all(len(set(row)) > min(length, vocabulary) // 2 for row in found)
    return found


def make_run(**sections: dict[str, Any]) -> Run:
    """Make a run without conf.load, which would refuse layouts that Megatron is to be asked about."""
    data: dict[str, dict[str, Any]] = {
        "model": {"source": "drawn"},
        "data": {"seq_length": 96},
        "train": {"steps": 10, "global_batch": 8},
        "optimizer": {"lr": 1e-4},
        "checkpoint": {"save_every": 10},
    }
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return Run.model_validate({"name": "drawn", **data})


def pair(seed: int) -> tuple[dict[str, Any], Run]:
    rng = random.Random(seed)
    pick = rng.choice
    config = dict(MODELS[pick(sorted(MODELS))])
    heads, layers = pick([6, 12, 12, 24, 24]), pick([4, 6, 6, 8, 12])
    if "n_layer" in config:
        config |= {"n_layer": layers, "n_head": heads, "n_embd": heads * pick([8, 16]), "n_inner": pick([64, 96, 96])}
        return config, _run(rng, config, layers)
    latent, family = "kv_lora_rank" in config, config["architectures"][0]
    kv = heads if latent else pick([n for n in range(1, heads + 1) if heads % n == 0])
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    even = 24 if "linear_num_key_heads" in config else 20  # a quarter of it is rotated
    config |= {"hidden_size": heads * pick([4, 8, 24]), "head_dim": pick([8, 16, even])}
    config |= {"vocab_size": pick([96, 96, 120, 100]), "intermediate_size": pick([48, 72, 96, 96])}
    config["tie_word_embeddings"] = family not in UNTIED and pick([False, True])
    if "moe_intermediate_size" in config:
        config["moe_intermediate_size"] = pick([24, 32, 48])
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if key in config:
            config[key] = pick([8, 12, 12, 24])
    for key in ("first_k_dense_replace", "decoder_sparse_step"):
        if key in config:
            config[key] = pick([1, 2])
    if family in UNTIED:
        config["num_nextn_predict_layers"] = pick([0, 0, 1, 2])
    if latent:
        config |= {"q_lora_rank": pick([None, 24, 36, 48]), "kv_lora_rank": pick([16, 24, 30]), "n_group": 1}
    return config, _run(rng, config, layers)


def _run(rng: random.Random, config: dict[str, Any], layers: int) -> Run:
    """Draw a run with degrees that would fit, and now and then one that does not."""
    pick = rng.choice
    moe = "num_experts_per_tok" in config
    tp, pp, cp = pick([1, 1, 2, 2, 3, 4, 8]), pick([1, 1, 2, 2, 3, 4]), pick([1, 1, 1, 2, 3])
    ep, etp = (pick([1, 1, 2, 3, 4, 6]), pick([1, 1, 2, 3, tp])) if moe else (pick([1] * 19 + [2]), 1)
    dense, expert = tp * cp * pp, etp * ep * pp
    world = lcm(dense, expert) * pick([1, 1, 2])
    world = pick([world] * 19 + [max(1, world // 2)])
    packed = pick([False, False, True])
    micro = pick([1] * 19 + [2]) if packed else pick([1, 2])
    vpp = pick([None, None, 2, 3]) if pp > 1 or rng.random() < 0.03 else None
    batch = max(1, micro * world // dense) * (pp * pick([1, 2]) if vpp else pick([1, 2, 3])) + pick([0] * 19 + [1])
    sp = (tp > 1 and (moe or pick([True, False]))) != (rng.random() < 0.05)
    layout = {
        "nodes": 1,
        "gpus_per_node": world,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "sp": sp,
        "vpp": vpp,
    }
    if pp > 1 and (layers % (pp * (vpp or 1)) or rng.random() < 0.3):
        each, first = layers // pp, pick([None, 1, 2])
        last = layers - (pp - 1) * each if first is None else layers - first - (pp - 2) * each
        layout |= {"first_stage_layers": first, "last_stage_layers": max(1, pick([last] * 9 + [last - 1]))}
    mla = [*MLA, "linear_q_proj"] if "kv_lora_rank" in config else []
    kind = pick(["lora", "lora", "dora", "none"])
    targets = rng.sample(TARGETS + mla, rng.randint(1, 4))
    adapter = {"kind": kind, "rank": pick([24, 24, 24, 6]), "targets": targets, "experts": pick(["each", "shared"])}
    grouped = pick([True, True, False])
    recompute = pick(["none", "none", "full", "selective"])
    spent: dict[str, Any] = {"recompute": recompute}
    if recompute == "full":
        spent["recompute_layers"] = pick([1, 1, 2])
    if recompute == "selective":
        modules = [name for name in MODULES if grouped or name != "moe_act"]  # else conf.schema.run refuses it
        spent["recompute_modules"] = rng.sample(modules, rng.randint(1, 3))
    return make_run(
        layout=layout,
        adapter=adapter,
        model={"source": "drawn", "mtp": pick([True, True, False])},
        data={"seq_length": pick([48, 96]) if rng.random() < 0.95 else 90, "packed": packed},
        train={"global_batch": batch, "micro_batch": micro, "precision": pick(["bf16", "bf16", "fp32"]), **spent},
        optimizer={"distributed": pick([True, True, False])},
        moe={
            "grouped_gemm": grouped,
            "dispatcher": pick(["alltoall"] * 4 + ["allgather", "flex"]),
            "freeze_router": pick([False, False, True]) and "num_experts_per_tok" in config,
        },
    )
