"""Settings and names common to the bridges of Llamas with experts."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
)

NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
OF_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def set_up(provider) -> None:
    """Set what config.json has no key for."""
    provider.normalization = "RMSNorm"
    provider.gated_linear_unit = True
    provider.add_bias_linear = False
    provider.hidden_dropout = 0.0
    provider.moe_permute_fusion = True


def mappings(of_layer: dict[str, str], *of_qkv: str) -> list[MegatronParamMapping]:
    """Return mappings of embeddings, norms, attention and further names of a layer; `of_qkv` is "weight", optionally
    "bias".
    """
    plain = [AutoMapping(name, released) for name, released in NAMES.items()]
    for name, released in (OF_LAYER | of_layer).items():
        plain.append(AutoMapping(f"decoder.layers.*.{name}", f"model.layers.*.{released}"))
    fused = [
        QKVMapping(
            f"decoder.layers.*.self_attention.linear_qkv.{kind}",
            **{part: f"model.layers.*.self_attn.{part}_proj.{kind}" for part in "qkv"},
        )
        for kind in of_qkv
    ]
    return [*plain, *fused]


def of_experts(released: str, gate: str, up: str, down: str) -> list[MegatronParamMapping]:
    """Return mappings of experts, in grouped products and as separate modules."""
    mappings: list[MegatronParamMapping] = []
    for prefix, suffix in (("", "*"), ("local_experts.*.", "")):
        fc1, fc2 = (f"decoder.layers.*.mlp.experts.{prefix}linear_{name}.weight{suffix}" for name in ("fc1", "fc2"))
        expert = f"model.layers.*.{released}.*"
        mappings += [
            GatedMLPMapping(fc1, gate=f"{expert}.{gate}.weight", up=f"{expert}.{up}.weight"),
            AutoMapping(fc2, f"{expert}.{down}.weight"),
        ]
    return mappings
