"""Gemma 3, the text model: norms before and after attention and MLP, and windows in five of six layers.

Norms are zero-centred: a weight of 0 scales by 1. config.json leaves out sizes that transformers has defaults for.
"""

from conf.families.parts import tensors
from conf.families.parts.family import ANY, DEFAULT, PLAIN, Family, Rotation, Serving
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import ModelFacts
from conf.families.parts.tensors import Tensor, Tensors

LOCAL, GLOBAL = "sliding_attention", "full_attention"
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
DEFAULTS |= {"tie_word_embeddings": True}


def facts(keys: Keys) -> ModelFacts:
    return llama_facts(Keys(DEFAULTS | keys.config), qk_norm=True, windows=True)


def layer(facts: ModelFacts, kind: str) -> Tensors:
    norms = [Tensor(f"{name}_layernorm.weight", (facts.hidden,), "norms") for name in NORMS]
    return [*norms, *tensors.attention(facts), *tensors.gated_mlp("mlp", facts.hidden, facts.ffn)]


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    # transformers does not use attn_logit_softcapping
    read=PLAIN | {"sliding_window", "query_pre_attn_scalar", "rope_local_base_freq", "attn_logit_softcapping"},
    assumed={
        "hidden_activation": ("gelu_pytorch_tanh", "silu"),  # on a GPU Megatron's fused gelu is the first
        "attention_bias": (False,),
        "use_bidirectional_attention": (False,),
        "sliding_window_pattern": (6,),
        "_sliding_window_pattern": (6,),
        "final_logit_softcapping": (None,),
    },
    fixed={"tie_word_embeddings": True},
    rotations=DEFAULT | {"linear": Rotation({"factor": ANY}, ("factor", "rope_type"))},  # transformers ignores type
    local_rotations=DEFAULT,
    stated=("sliding_window",),
    not_null=("sliding_window", *DEFAULTS, "query_pre_attn_scalar", "hidden_activation"),
    defaults=DEFAULTS,
    layer_turns=(*[LOCAL] * 5, GLOBAL),
    facts=facts,
    layer=layer,
    serving=Serving(packed=True),
    megatron="trainer.megatron.bridges.gemma3",
    constants={"norm.weight": 0.0},
    releases={"google/gemma-3-270m-it": 0.27, "google/gemma-3-1b-it": 1.0},
)
