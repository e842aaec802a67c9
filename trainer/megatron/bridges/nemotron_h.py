"""Bridge of Nemotron-H: a GPT model whose layers are one block each, with Megatron-Bridge's names of weights.

Megatron-Bridge builds core's HybridModel, which has no virtual pipeline stages and names layers in its own way. The
layer of multi-token prediction has two blocks, attention and experts, so it is an ordinary layer of a GPT model.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false

from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.nemotronh import nemotron_h_bridge
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from transformers import NemotronHForCausalLM

from conf import families
from conf.model_files import weights
from trainer.patches.families import mamba
from trainer.startup import device

NO_MIXER = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
NO_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
LINEARS = MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear)

KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "vocab_size": "vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
    "layer_norm_epsilon": "layernorm_epsilon",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "n_groups": "mamba_num_groups",
    "ssm_state_size": "mamba_state_dim",
}
OF_EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


# Blocks of a multi-token-prediction layer, with their layer of a release, and the other weights of the layer.
AHEAD = {"self_attention.": 0, "mlp.": 1, "pre_mlp_layernorm.": 1}
BESIDES = {"enorm": 0, "hnorm": 0, "eh_proj": 0, "final_layernorm": 1}


class Layer(TransformerLayer):
    """A layer of one block. For multi-token prediction it has both blocks of `submodules`."""

    def __init__(self, config, submodules, *args, block, is_mtp_layer=False, **kwargs):
        super().__init__(config, submodules if is_mtp_layer else block, *args, is_mtp_layer=is_mtp_layer, **kwargs)


def block_spec(config, vp_stage=None, *, kinds: list[str], mixer: ModuleSpec):
    """Return the layers of this pipeline stage: those of a GPT model, each without one of its two blocks."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    every = get_gpt_decoder_layer_specs(config, use_transformer_engine=True)
    both = every[kinds.index("moe") if "moe" in kinds else 0].submodules
    blocks = {"attention": NO_MLP, "mamba": NO_MLP | {"self_attention": mixer}, "mlp": NO_MIXER, "moe": NO_MIXER}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    spec.layer_specs = [
        replace(layer, module=Layer, params={"block": replace(layer.submodules, **blocks[kind])}, submodules=both)
        for layer, kind in zip(spec.layer_specs, kinds[first:], strict=False)
    ]
    return spec


class Bridge(nemotron_h_bridge.NemotronHBridge):
    CONFIG_MAPPING = tuple(KEYS.items())

    def provider_bridge(self, hf_pretrained):
        provider = MegatronModelBridge.provider_bridge(self, hf_pretrained)
        config, kinds = hf_pretrained.config, hf_pretrained.config.layers_block_type
        sizes = {"d_conv": config.conv_kernel, "least_step": 0.0 if device.has_gpu() else config.time_step_min}
        mixer = ModuleSpec(mamba.Mamba, params=sizes, submodules=LINEARS)
        provider.transformer_layer_spec = partial(block_spec, kinds=kinds, mixer=mixer)
        provider.position_embedding_type, provider.normalization = "none", "RMSNorm"
        provider.activation_func, provider.gated_linear_unit = squared_relu, False
        provider.bias_activation_fusion = False  # only for gelu and gated units
        provider.add_bias_linear = provider.share_embeddings_and_output_weights = False
        provider.hidden_dropout, provider.hetereogenous_dist_checkpoint = 0.0, True
        names = self._names()
        if not names or any(name.startswith(self._family().ahead) for name in names):  # transformers saves only the key
            provider.mtp_num_layers = config.num_nextn_predict_layers
        if "moe" in kinds:
            for key, field in OF_EXPERTS.items():
                setattr(provider, field, getattr(config, key))
            provider.moe_layer_freq = [int(kind == "moe") for kind in kinds]
            provider.moe_router_score_function, provider.moe_router_enable_expert_bias = "sigmoid", True
            provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "seq_aux_loss", 1e-4
            provider.moe_shared_expert_overlap = provider.moe_grouped_gemm = True
        return provider

    def mapping_registry(self):
        mappings = [each for each in super().mapping_registry().mappings if not each.megatron_param.startswith("mtp.")]
        for mapping in mappings:
            mapping.megatron_param = mapping.megatron_param.replace(".mixer.", ".self_attention.")
            if mapping.hf_param == "backbone.embeddings.weight":
                mapping.hf_param = self._family().embedded(self._names())
        ahead = [
            AutoMapping(f"mtp.layers.0.{name}.weight", f"mtp.layers.{of}.{name}.weight") for name, of in BESIDES.items()
        ]
        return MegatronMappingRegistry(*mappings, *ahead, *filter(None, map(_ahead, mappings)))

    def _family(self) -> families.Family:
        return families.named(self.hf_config.architectures[0])

    def _names(self) -> set[str]:
        return weights.names(Path(self.hf_config._name_or_path))


def _ahead(mapping):
    """Return the mapping of the same weight in the layer of multi-token prediction; None if it has no such weight."""
    part = mapping.megatron_param.removeprefix("decoder.layers.*.")
    of = next((of for block, of in AHEAD.items() if part.startswith(block)), None)
    if of is None:
        return None

    def place(name: str) -> str:
        return name.replace("backbone.layers.*", f"mtp.layers.{of}")

    found, names = copy(mapping), mapping.hf_param
    found.megatron_param = f"mtp.layers.0.mtp_model_layer.{part}"
    found.hf_param = place(names) if isinstance(names, str) else {role: place(name) for role, name in names.items()}
    return found


mamba.install()
for source in NemotronHForCausalLM, NemotronHForCausalLM.__name__:
    MegatronModelBridge.register_bridge(source=source, target=GPTModel, provider=GPTModelProvider)(Bridge)
