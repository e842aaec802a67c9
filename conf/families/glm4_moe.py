"""GLM-4.5 to 4.7: dense layers, then experts chosen by sigmoid scores and a bias, and multi-token prediction.

In the tiny models, heads x head_dim is not hidden_size, as in the releases.
"""

from functools import partial

from conf.families.parts import family as shared
from conf.families.parts.family import Balance, Family, Serving
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    read=shared.PLAIN | shared.SIGMOID_EXPERTS | {"attention_bias", "use_qk_norm", "partial_rotary_factor"},
    assumed=shared.SIGMOID,
    fixed={"n_shared_experts": 1, "tie_word_embeddings": False},
    rotations=shared.DEFAULT,
    defaults={"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5},
    stated=(*shared.HEADS, *shared.SIGMOID_SIZES, *shared.COUNTS, "attention_bias", "use_qk_norm"),
    not_null=(*shared.HEADS, *shared.SIGMOID_SIZES, *shared.COUNTS, *shared.GROUPED, "use_qk_norm"),
    facts=partial(llama_facts, expert_bias=True),
    balance=Balance(always=True),
    serving=Serving(packed=True),
    gguf="glm4moe",
    releases={"zai-org/GLM-4.5-Air": 110.0, "zai-org/GLM-4.7": 358.0},
)
