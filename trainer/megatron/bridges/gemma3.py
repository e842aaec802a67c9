"""Bridge of Gemma 3: Megatron-Bridge's for the text model, by the names of a release.

Megatron-Bridge's o_proj and down_proj contain the norm that follows them, so it would add an adapter after that norm,
and the adapter could not be merged; its norm also ignores rms_norm_eps. Here the norm is outside the layer. The
embedding's factor is rounded to the embedding's type, as in transformers.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gemma import gemma3_bridge, gemma3_provider
from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from conf import families
from conf.model_files import weights

NORMS = {"self_attention.linear_proj.post_layernorm": "post_self_attn_layernorm"}  # by Megatron-Bridge's names
NORMS |= {"mlp.linear_fc2.post_layernorm": "post_mlp_layernorm"}


class Layer(TransformerLayer):
    """A layer with a norm after attention and one after the MLP."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = TENorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.post_mlp_layernorm = TENorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attn_bda = partial(_normed, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_normed, self.post_mlp_layernorm, self.mlp_bda)


def _normed(norm, bias_dropout_add, *options):
    """Return core's sum of a part's output and the residual, of the normed output."""
    usual = bias_dropout_add(*options)
    return lambda output, *others: usual((norm(output[0]), output[1]), *others)


class Embedding(gemma3_provider.Gemma3LanguageModelEmbedding):
    def forward(self, *args, **kwargs):
        embeddings = LanguageModelEmbedding.forward(self, *args, **kwargs)
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)


def layer_spec(config):
    spec = gemma3_provider.gemma3_layer_spec(config)
    parts = spec.submodules
    spec.module = Layer
    parts.self_attention.submodules.linear_proj = parts.mlp.submodules.linear_fc2 = TERowParallelLinear
    return spec


class Bridge(gemma3_bridge.Gemma3ModelBridge):
    def provider_bridge(self, hf_pretrained):
        config = hf_pretrained.config
        text = config.get_text_config()
        text.dtype = text.dtype or config.dtype
        text.hidden_act = text.hidden_activation  # Megatron-Bridge prefers hidden_act, which transformers ignores
        provider = super().provider_bridge(SimpleNamespace(config=text))
        provider.transformer_layer_spec = layer_spec
        return provider

    def mapping_registry(self):
        family = families.named(self.hf_config.architectures[0])
        root = family.root(weights.names(Path(self.hf_config._name_or_path)))
        mappings = super().mapping_registry().mappings
        for mapping in mappings:
            for part, norm in NORMS.items():
                mapping.megatron_param = mapping.megatron_param.replace(part, norm)
            mapping.hf_param = _below(root, mapping.hf_param)
        return MegatronMappingRegistry(*mappings)


def _below(root: str, names):
    if isinstance(names, dict):
        return {key: _below(root, name) for key, name in names.items()}
    return names.replace("model.", root, 1)


gemma3_provider.Gemma3LanguageModelEmbedding = Embedding
for model in (Gemma3ForCausalLM, Gemma3ForConditionalGeneration):
    MegatronModelBridge.register_bridge(source=model, target=GPTModel)(Bridge)
