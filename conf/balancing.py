"""Training of routers beyond the loss of tokens: balance of experts, the z loss, and the experts' bias.

    is_balanced(run, config)    whether the run has any of these, by its keys and the released model's config.json
    IDENTITY                    what the identity of such a run has: trainings before counted micro batches, and padding

Each is computed over rows of the data (trainer/megatron/routers/balance.py): train.micro_batch, the layout and
packing do not bear on them.
"""

from typing import Any

from conf.model_files import config_json
from conf.schema.run import Run

IDENTITY = {"balance_over": "rows"}
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
