"""Bridge of Gemma 4, the text model: norms outside the layers that adapters wrap, as in Gemma 3.

The MLP next to the experts is Megatron's shared experts. Each of the two, and the router, has its own norm of the
layer's input. Layers pass keys, values and the vectors of PerLayer to later layers in a dict, so these models need
layout.pp 1, and recomputation of whole layers would lose gradients.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.gemma.modeling_gemma4 import Gemma4RotaryEmbedding
from megatron.bridge.models.gpt_provider import GPTModelProvider, transformer_engine_layer_spec
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import gelu, rms_norm, silu
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration

from conf import families
from conf.model_facts import facts_from_hf
from conf.model_files import weights
from trainer.megatron.bridges import gemma3
from trainer.megatron.bridges.mappings import GroupsMapping

NAMES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "embedding.per_layer.table.weight": "embed_tokens_per_layer.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}
PER_LAYER = {
    "embedding.per_layer.projection.weight": "per_layer_model_projection.weight",
    "embedding.per_layer.norm.weight": "per_layer_projection_norm.weight",
    "decoder.layers.*.per_layer_gate.weight": "layers.*.per_layer_input_gate.weight",
    "decoder.layers.*.per_layer_projection.weight": "layers.*.per_layer_projection.weight",
    "decoder.layers.*.per_layer_norm.weight": "layers.*.post_per_layer_input_norm.weight",
}
OF_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
OF_MLP = {
    "linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "linear_fc2.weight": "mlp.down_proj.weight",
}
OF_EXPERTS = {
    "mlp.pre_experts_layernorm.weight": "pre_feedforward_layernorm_2.weight",
    "mlp.post_experts_layernorm.weight": "post_feedforward_layernorm_2.weight",
    "mlp.post_shared_experts_layernorm.weight": "post_feedforward_layernorm_1.weight",
}
OF_ROUTER = {
    "mlp.router.weight": "router.proj.weight",
    "mlp.router.scale": "router.scale",
    "mlp.router.per_expert_scale": "router.per_expert_scale",
}


@dataclass
class Provider(GPTModelProvider):
    """Settings of the model, with those that Megatron lacks."""

    heads: dict[int, tuple[bool, int, int, int]] = field(default_factory=dict)  # of each layer, from 1; see Attention
    local_rotation: dict = field(default_factory=dict)
    wide_rotation: dict = field(default_factory=dict)
    logit_cap: float | None = None
    borrowing: int = 0  # last layers with the keys and values of earlier ones
    borrowing_ffn: int = 0
    per_layer: int = 0

    def provide(self, *args, **kwargs):
        model = super().provide(*args, **kwargs)
        model.rotary_pos_emb = _rotations(self)
        shared: dict = {}
        for layer in model.decoder.layers:
            layer.shared = layer.self_attention.shared = shared
        if model.pre_process:
            model.embedding.__class__ = Embedding
            model.embedding.shared = shared
            if self.per_layer:
                model.embedding.per_layer = PerLayer(self, model.pg_collection.tp)
        if model.post_process and self.logit_cap:
            model.output_layer.register_forward_hook(partial(_cap, self.logit_cap))
        return model


def _cap(most: float, _layer, _inputs, outputs):
    logits, bias = outputs
    return torch.tanh(logits / most) * most, bias


def _rotations(provider: Provider) -> Gemma4RotaryEmbedding:
    """Return the tables of rotations of both kinds of layers; the wide ones rotate a part of each head."""
    wide = provider.wide_rotation
    table = Gemma4RotaryEmbedding(
        rotary_base=wide["rope_theta"],
        rotary_base_local=provider.local_rotation["rope_theta"],
        global_kv_channels=next(width for wide, _, width, _ in provider.heads.values() if wide),
        global_rotary_percent=wide.get("partial_rotary_factor", 1.0),
        kv_channels=provider.kv_channels,
        use_cpu_initialization=provider.use_cpu_initialization,
    )
    table.inv_freq /= wide.get("factor", 1.0)
    return table


class Embedding(gemma3.Embedding):
    def forward(self, input_ids, *args, **kwargs):
        embeddings = super().forward(input_ids, *args, **kwargs)
        if self.config.per_layer:
            self.shared[PerLayer] = self.per_layer(input_ids, embeddings)
        return embeddings


class PerLayer(MegatronModule):
    """A vector of each token for each layer: from a table, and from the token's embedding."""

    def __init__(self, config, group):
        super().__init__(config)
        width = config.num_layers * config.per_layer
        cut = {"reduce_scatter_embeddings": config.sequence_parallel, "tp_group": group}
        self.table = VocabParallelEmbedding(
            config.vocab_size, width, init_method=config.embedding_init_method, config=config, **cut
        )
        self.projection = _linear(config.hidden_size, width, config)
        self.norm = TENorm(config, config.per_layer, eps=config.layernorm_epsilon)

    def forward(self, input_ids, embeddings):
        of_tokens = self.table(input_ids) * torch.tensor(self.config.per_layer**0.5, dtype=embeddings.dtype)
        of_tokens = of_tokens if self.config.sequence_parallel else of_tokens.transpose(0, 1)
        projected = self.projection(embeddings) * self.config.hidden_size**-0.5
        by_layer = (-1, self.config.per_layer)
        return (self.norm(projected.unflatten(-1, by_layer)) + of_tokens.unflatten(-1, by_layer)) * 2**-0.5


def _linear(inputs: int, outputs: int, config) -> torch.nn.Linear:
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)
    linear.weight.sequence_parallel = config.sequence_parallel
    return linear


class Attention(SelfAttention):
    """Attention with a norm of values.

    config.heads says for each layer whether its heads are wide, its groups, their width, and its weights: 3 with keys
    and values; 2 if values are keys without their norm; 1 with the keys and values of an earlier layer of its kind.
    """

    def __init__(self, config, submodules, layer_number, *args, **kwargs):
        config = copy(config)
        self.wide, config.num_query_groups, config.kv_channels, self.weights = config.heads[layer_number]
        lacking = (3 - self.weights) * config.num_query_groups * config.kv_channels
        submodules = replace(submodules, linear_qkv=partial(_without, lacking, submodules.linear_qkv))
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        if self.weights == 1:
            self.k_layernorm = None
        elif config.perform_initialization:  # scores have no factor: without this, gradients of new models overflow
            torch.nn.init.constant_(self.k_layernorm.weight, config.kv_channels**-0.5)

    def forward(self, *args, rotary_pos_emb, **kwargs):
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[self.wide], **kwargs)

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **options):
        if self.weights == 3:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
        else:
            mixed, _ = self.linear_qkv(hidden_states)
            heads = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
            query = self.q_layernorm(heads[..., : heads.shape[-2] + 1 - self.weights, :].flatten(2, 3))
            if self.weights == 1:
                return query, *self.shared[self.wide]
            value = heads[..., -1, :]
            key = self.k_layernorm(value)
        value = _normed(value, self.config)
        if self.config.borrowing:
            self.shared[self.wide] = key, value
        return query, key, value


def _without(lacking: int, linear, inputs, outputs, **options):
    return linear(inputs, outputs - lacking, **options)


def _normed(tensor, config):
    return rms_norm(tensor, tensor.shape[-1:], eps=config.layernorm_epsilon)


class Layer(gemma3.Layer):
    def __init__(self, config, submodules, layer_number=1, *args, **kwargs):
        own = config
        if config.borrowing and layer_number > config.num_layers - config.borrowing:
            own = copy(config)
            own.ffn_hidden_size = config.borrowing_ffn
        super().__init__(own, submodules, layer_number, *args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        if config.per_layer:
            self.per_layer_gate = _linear(config.hidden_size, config.per_layer, config)
            self.per_layer_projection = _linear(config.per_layer, config.hidden_size, config)
            self.per_layer_norm = TENorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        output, context = super().forward(*args, **kwargs)
        if self.config.per_layer:
            gate = self.per_layer_gate(output)
            gate = silu(gate) if self.config.activation_func is silu else gelu(gate, approximate="tanh")
            gated = gate * self.shared[PerLayer][..., self.layer_number - 1, :]
            output = output + self.per_layer_norm(self.per_layer_projection(gated))
        return output * self.layer_scalar, context


class Router(TopKRouter):
    """A router of normed and scaled tokens, whose weights of experts are scaled again."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.scale = _parameter(config.hidden_size, config)
        self.per_expert_scale = _parameter(config.num_moe_experts, config)

    def gating(self, input):
        return super().gating(_normed(input, self.config) * self.scale * self.config.hidden_size**-0.5)

    def routing(self, *args, **kwargs):
        weights, routes = super().routing(*args, **kwargs)
        if self.topk == 1:  # core would keep the only expert's share of all experts
            weights = routes.to(weights.dtype)
        return weights * self.per_expert_scale, routes


def _parameter(size: int, config) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


class Experts(MoELayer):
    """Experts and an MLP next to each other, with a norm before and after each."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        norm = partial(TENorm, config, config.hidden_size, eps=config.layernorm_epsilon)
        self.pre_experts_layernorm, self.post_experts_layernorm = norm(), norm()
        self.post_shared_experts_layernorm = norm()

    def preprocess(self, hidden_states, probs, routing_map):
        return super().preprocess(self.pre_experts_layernorm(hidden_states), probs, routing_map)

    def postprocess(self, output, shared_expert_output):
        routed = self.post_experts_layernorm(super().postprocess(output, None))
        return routed + self.post_shared_experts_layernorm(shared_expert_output)


def layer_spec(config):
    spec = transformer_engine_layer_spec(config)
    spec.module, parts = Layer, spec.submodules
    parts.self_attention.module = Attention
    if config.num_moe_experts:
        experts = parts.mlp.keywords["submodules"]
        shared = experts.shared_experts
        mlp = replace(shared.keywords["submodules"], linear_fc1=TELayerNormColumnParallelLinear)
        experts = replace(experts, router=Router, shared_experts=partial(shared.func, submodules=mlp))
        parts.mlp, parts.pre_mlp_layernorm = partial(Experts, submodules=experts), IdentityOp
    return spec


class Bridge(MegatronModelBridge):
    def provider_bridge(self, hf_pretrained):
        config = hf_pretrained.config
        text = config.get_text_config()
        text.dtype = text.dtype or config.dtype
        facts = facts_from_hf(config.to_dict())
        settings = self.hf_config_to_provider_kwargs(text) | {"rotary_percent": 1.0}
        moe = {
            "num_moe_experts": facts.experts,
            "moe_router_topk": facts.top_k,
            "moe_router_pre_softmax": facts.top_k == 1,
            "moe_ffn_hidden_size": facts.expert_ffn,
            "moe_shared_expert_intermediate_size": facts.shared_ffn,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_permute_fusion": True,
        }
        rotations = text.rope_parameters
        settings |= moe if facts.experts else dict.fromkeys(("num_moe_experts", "moe_ffn_hidden_size"))
        layers = [facts.of(kind) for kind in facts.kinds]
        return Provider(
            **settings,
            normalization="RMSNorm",
            gated_linear_unit=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            position_embedding_type="rope",
            qk_layernorm=True,
            softmax_scale=1.0,
            window_size=(text.sliding_window - 1, 0),
            window_attn_skip_freq=[int(layer not in facts.wide_layers) for layer in range(facts.layers)],
            hetereogenous_dist_checkpoint=True,
            transformer_layer_spec=layer_spec,
            heads={
                number + 1: (number in facts.wide_layers, of.kv_heads, of.head_dim, 1 + of.keys + of.values)
                for number, of in enumerate(layers)
            },
            local_rotation=rotations["sliding_attention"],
            wide_rotation=rotations["full_attention"],
            logit_cap=text.final_logit_softcapping,
            borrowing=facts.borrowing,
            borrowing_ffn=facts.borrowing_ffn,
            per_layer=facts.per_layer,
        )

    def mapping_registry(self):
        family = families.named(self.hf_config.architectures[0])
        facts = facts_from_hf(self.hf_config.to_dict())
        root = family.root(weights.names(Path(self.hf_config._name_or_path)))
        mapped = [AutoMapping(name, root + released) for name, released in NAMES.items()]
        mapped += [AutoMapping("output_layer.weight", "lm_head.weight")]
        mapped += _of_layer("decoder.layers.*.", f"{root}layers.*.", facts.experts > 0)
        mapped += [ReplicatedMapping(name, root + released) for name, released in PER_LAYER.items()]
        for layer, kind in enumerate(facts.kinds):
            heads, released = facts.of(kind), f"{root}layers.{layer}.self_attn"
            names = {part: f"{released}.{part}_proj.weight" for part in "qkv"[: 1 + heads.keys + heads.values]}
            own = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
            mapped.append(GroupsMapping(own, heads.kv_heads, heads.heads // heads.kv_heads, **names))
        return MegatronMappingRegistry(*mapped)


def _of_layer(layer: str, released: str, moe: bool) -> list:
    mlp = "mlp.shared_experts." if moe else "mlp."
    plain = OF_LAYER | {mlp + name: of for name, of in OF_MLP.items()} | (OF_EXPERTS if moe else {})
    mapped = [AutoMapping(layer + name, released + of) for name, of in plain.items()]
    whole = {"layer_scalar": "layer_scalar"} | (OF_ROUTER if moe else {})
    mapped += [ReplicatedMapping(layer + name, released + of) for name, of in whole.items()]
    gate, up = (f"{released}mlp.{part}_proj.weight" for part in ("gate", "up"))
    mapped.append(GatedMLPMapping(f"{layer}{mlp}linear_fc1.weight", gate=gate, up=up))
    for prefix, suffix in (("", "*"), ("local_experts.*.", "")) if moe else ():
        fc1, fc2 = (f"{layer}mlp.experts.{prefix}linear_{name}.weight{suffix}" for name in ("fc1", "fc2"))
        mapped.append(FusedGatedExpertMapping(fc1, f"{released}experts.gate_up_proj"))
        mapped.append(FusedExpertMapping(fc2, f"{released}experts.down_proj"))
    return mapped


for model in (Gemma4ForCausalLM, Gemma4ForConditionalGeneration):
    MegatronModelBridge.register_bridge(source=model, target=GPTModel)(Bridge)
