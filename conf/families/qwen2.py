"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values. No key of config.json mentions the biases."""

from functools import partial

from conf.families.parts.family import DEFAULT, PLAIN, QWENS, YARN, Family, Serving
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read=PLAIN | {"attention_bias"},
    assumed=QWENS,
    rotations=DEFAULT | YARN,
    stated=("num_key_value_heads",),
    not_null=("head_dim",),
    facts=partial(llama_facts, attention_bias=True),
    gguf="qwen2",
    serving=Serving(packed=True),
    releases={"Qwen/Qwen2.5-0.5B-Instruct": 0.49},
)
