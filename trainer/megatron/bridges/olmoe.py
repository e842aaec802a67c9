"""Bridge of OLMoE: Megatron-Bridge's own, with norms over all heads together."""

from trainer.patches import lazy_bridge
from trainer.patches.families import norms_over_heads

lazy_bridge.load_family("OlmoeForCausalLM")
norms_over_heads.install()
