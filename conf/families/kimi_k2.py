"""Kimi-K2: a DeepSeek-V3 with more experts, whose config.json has another model_type.

The release and the tiny model have the older names of the keys for rotary embeddings.
"""

from dataclasses import replace

from conf.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY, model_type="kimi_k2", read_as="deepseek_v3", releases={"moonshotai/Kimi-K2-Instruct": 1026.0}
)
