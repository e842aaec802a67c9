"""Losses of a training next to that of the next token: balance of experts and the routers' z loss, and MTP layers.

    identity(run, config)       what the identity of a training has of them, by section
    is_balanced(run, config)    whether routers are trained so, or the experts' bias is
    looks_ahead(run, config)    whether MTP layers are

`config` is the released model's config.json. Each loss is one over rows of the data, or over their learned tokens
(trainer/megatron/routers/balance.py, trainer/patches/gradients/mtp_loss.py): train.micro_batch, the layout and packing
do not bear on them. Earlier trainings computed them over micro batches and padding, and have other fingerprints.
"""

from typing import Any

from conf.model_files import config_json
from conf.schema.run import Run

BALANCE = {"moe": {"balance_over": "rows"}}
AHEAD = {"model": {"mtp_loss_over": "learned tokens"}}
# The key of config.json with the weight of balancing, which Megatron-Bridge 0.6 otherwise has a number above 0 for;
# null = it has that number whatever config.json says. Families of experts without an entry have no balancing.
WEIGHTS = {
    "Glm4MoeForCausalLM": None,
    "Glm4MoeLiteForCausalLM": None,
    "Qwen3MoeForCausalLM": None,
    "DeepseekV3ForCausalLM": "aux_loss_alpha",
    "OlmoeForCausalLM": "router_aux_loss_coef",
    "MiniMaxM2ForCausalLM": "router_aux_loss_coef",
    "MixtralForCausalLM": "router_aux_loss_coef",
    "Qwen2MoeForCausalLM": "router_aux_loss_coef",
}
UNBALANCED = ("GptOssForCausalLM",)
BIASED = ("DeepseekV3ForCausalLM", "MiniMaxM2ForCausalLM")  # whose bias follows how busy experts are


def identity(run: Run, config: dict[str, Any]) -> dict[str, dict[str, str]]:
    return (BALANCE if is_balanced(run, config) else {}) | (AHEAD if looks_ahead(run, config) else {})


def looks_ahead(run: Run, config: dict[str, Any]) -> bool:
    learned = run.model.mtp_loss_scale > 0 and run.train.objective == "sft"
    return run.model.mtp and learned and bool(config.get("num_nextn_predict_layers"))


def is_balanced(run: Run, config: dict[str, Any]) -> bool:
    architecture, moe = config_json.architecture(config), run.moe
    if architecture not in (*WEIGHTS, *UNBALANCED):
        return False
    moves_bias = architecture in BIASED and run.adapter.kind == "none" and not moe.freeze_router
    return bool(moe.z_loss_coeff) or moves_bias or bool(_weight(run, config, architecture))


def _weight(run: Run, config: dict[str, Any], architecture: str) -> float:
    moe = run.moe
    if moe.balance == "none" or (moe.balance == "model" and architecture in UNBALANCED):
        return 0.0
    if moe.aux_loss_coeff is not None:
        return moe.aux_loss_coeff
    key = WEIGHTS.get(architecture, "router_aux_loss_coef")
    return 1.0 if key is None else config.get(key, 1.0)
