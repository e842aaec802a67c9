"""Kimi-K2: a DeepSeek-V3 with more experts, whose config.json has another model_type."""

from dataclasses import replace

from conf.families import deepseek_v3

SCALED = dict(type="yarn", factor=32.0, original_max_position_embeddings=64)
SCALED |= dict(beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
# The release uses the older key names for rotary embeddings.
SMALL = {key: value for key, value in deepseek_v3.SMALL.items() if key != "rope_parameters"}
SMALL |= dict(n_group=1, rope_scaling=SCALED, rope_theta=5e4)

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="kimi_k2",
    read_as="deepseek_v3",
    releases={"moonshotai/Kimi-K2-Instruct": 1026.0},
    tiny={"": SMALL},
)
