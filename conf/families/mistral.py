"""Mistral 7B: a Llama whose layers may all attend to a window of earlier tokens."""

from conf.families.parts.family import DEFAULT, PLAIN, SILU, Family, Serving
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import ModelFacts


def facts(keys: Keys) -> ModelFacts:
    return llama_facts(keys, windows=keys.config.get("sliding_window") is not None)


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    read=PLAIN | {"sliding_window"},
    assumed=SILU | {"attention_bias": (False,)},
    rotations=DEFAULT,
    stated=("sliding_window", "num_key_value_heads"),
    not_null=("num_key_value_heads",),
    facts=facts,
    serving=Serving(packed=True),
)
