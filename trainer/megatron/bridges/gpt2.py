"""Bridge of GPT-2: learned positions, LayerNorm, biases everywhere, one matrix for q, k and v, matrices transposed.

The releases' vocabulary of 50,257 cannot be divided over ranks, so Megatron pads it. Padding has embeddings of zeros
and would get the logit 0, while GPT-2's tokens have logits around -40. The padding's logits are therefore masked.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ConcatenatedQKVMapping, ReplicatedMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import GPT2LMHeadModel

from conf.families import gpt2
from conf.model_files import weights
from trainer.megatron.bridges.mappings import PaddedVocabularyMapping, TransposedQKVMapping
from trainer.patches.families import head_models

head_models.install()
NO_TOKEN = -1e4  # logit of the vocabulary's padding


@dataclass
class GPT2Provider(GPTModelProvider):
    """Provider of GPT-2, with all of its positions and a padded vocabulary for every sequence length."""

    positions: int = 1024

    def finalize(self) -> None:
        # gelu_new uses tanh; so does Megatron's fused gelu, which is selected by torch's gelu.
        fused = self.bias_activation_fusion
        self.activation_func = torch.nn.functional.gelu if fused else tanh_gelu
        super().finalize()

    def provide(self, *args, **kwargs):
        length, self.seq_length, self.should_pad_vocab = self.seq_length, self.positions, True
        try:
            model = super().provide(*args, **kwargs)
        finally:
            self.seq_length = length
        if model.post_process:
            model.output_layer.register_forward_hook(partial(_mask, self.vocab_size))
        return model


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _mask(tokens: int, layer, _, output):
    logits, bias = output
    first = tokens - logits.shape[-1] * parallel_state.get_tensor_model_parallel_rank()
    if first >= logits.shape[-1]:
        return output
    return _Masked.apply(logits, max(0, first)), bias


class _Masked(torch.autograd.Function):
    """Overwrite the logits of the padding in place, because a copy of all logits takes 3 % of a step.

    After a softmax the padding has probability 0, so its gradients are already 0.
    """

    @staticmethod
    def forward(ctx, logits, first):
        logits[..., first:] = NO_TOKEN
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@MegatronModelBridge.register_bridge(source=GPT2LMHeadModel, target=GPTModel, provider=GPT2Provider, model_type="gpt2")
class GPT2Bridge(MegatronModelBridge):
    """Bridge between transformers' GPT2LMHeadModel and Megatron's GPTModel."""

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config

        provider.ffn_hidden_size = config.n_inner or 4 * config.n_embd
        provider.num_query_groups = config.n_head
        provider.kv_channels = config.n_embd // config.n_head
        provider.positions = config.n_positions
        provider.make_vocab_size_divisible_by = 128
        provider.position_embedding_type = "learned_absolute"
        provider.layernorm_epsilon = config.layer_norm_epsilon
        provider.add_qkv_bias = True
        provider.hidden_dropout = 0.0
        provider.attention_dropout = 0.0
        provider.bias_activation_fusion = True
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        root = self._root()
        mappings = [
            PaddedVocabularyMapping("embedding.word_embeddings.weight", f"{root}wte.weight"),
            PaddedVocabularyMapping("output_layer.weight", "lm_head.weight"),  # if not tied
            ReplicatedMapping("embedding.position_embeddings.weight", f"{root}wpe.weight"),
        ]
        layer, released = "decoder.layers.*.", f"{root}h.*."
        for kind in ("weight", "bias"):
            plain = {
                "decoder.final_layernorm.": f"{root}ln_f.",
                f"{layer}self_attention.linear_qkv.layer_norm_": f"{released}ln_1.",
                f"{layer}mlp.linear_fc1.layer_norm_": f"{released}ln_2.",
            }
            mappings += [
                AutoMapping(megatron_param=f"{name}{kind}", hf_param=f"{released_name}{kind}")
                for name, released_name in plain.items()
            ]
            linear = {
                "self_attention.linear_proj": "attn.c_proj",
                "mlp.linear_fc1": "mlp.c_fc",
                "mlp.linear_fc2": "mlp.c_proj",
            }
            permutation = (1, 0) if kind == "weight" else None
            mappings += [
                AutoMapping(f"{layer}{name}.{kind}", f"{released}{released_name}.{kind}", permutation)
                for name, released_name in linear.items()
            ]
            qkv = TransposedQKVMapping if kind == "weight" else ConcatenatedQKVMapping
            mappings.append(qkv(f"{layer}self_attention.linear_qkv.{kind}", f"{released}attn.c_attn.{kind}"))
        return MegatronMappingRegistry(*mappings)

    def _root(self) -> str:
        """Return the prefix of names: the class's, or "" as in OpenAI's releases."""
        assert self.hf_config, "Bridge sets it before it reads names"
        return gpt2.FAMILY.root(weights.names(Path(self.hf_config._name_or_path)))
