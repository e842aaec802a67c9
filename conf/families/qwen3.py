"""Qwen3, dense: a Llama with norms of queries and keys.

The embedding of the tiny model is tied, as in the releases up to 4B.
"""

from functools import partial

from conf.families.parts.family import DEFAULT, HEADS, PLAIN, QWENS, YARN, Family, Serving
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=PLAIN,
    assumed=QWENS | {"attention_bias": (False,)},
    rotations=DEFAULT | YARN,
    stated=HEADS,
    not_null=("head_dim",),
    facts=partial(llama_facts, qk_norm=True),
    serving=Serving(packed=True),
    gguf="qwen3",
    releases={
        "Qwen/Qwen3-1.7B": 1.7,
        "Qwen/Qwen3-4B": 4.0,
        "Qwen/Qwen3-8B": 8.2,
        "Qwen/Qwen3-14B": 14.8,
        "Qwen/Qwen3-32B": 32.8,
    },
)
