"""GLM-4.7-Flash: latent attention, one dense layer, then experts chosen by sigmoid scores and a bias."""

from functools import partial

from conf.families.parts import family as shared
from conf.families.parts.family import Balance, Family, Serving
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    read=shared.LATENT_EXPERTS,
    # transformers reads mlp_layer_types. Without that key one layer is dense, whatever first_k_dense_replace says.
    assumed=shared.SIGMOID | {"rope_interleave": (True,), "partial_rotary_factor": (1,), "first_k_dense_replace": (1,)},
    fixed={"tie_word_embeddings": False, "attention_bias": False},
    rotations=shared.DEFAULT,
    defaults={"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
    repeats={"head_dim": "qk_rope_head_dim"},
    stated=(*shared.SIGMOID_SIZES, *shared.COUNTS, *shared.RANKS),
    not_null=(*shared.SIGMOID_SIZES, *shared.COUNTS, *shared.RANKS, *shared.GROUPED, "num_key_value_heads"),
    facts=partial(llama_facts, expert_bias=True),
    by_name=True,
    balance=Balance(always=True),
    serving=Serving(packed=True),
)
