"""A model's tensors by their names and shapes, as its family releases them, from its config.json."""

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def attention_shapes(c: Config) -> Shapes:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        return {
            "self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            "self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
            "self_attn.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), c["kv_lora_rank"]),
            "self_attn.o_proj.weight": (hidden, heads * value),
        }
    width, kv_heads = c["head_dim"], c["num_key_value_heads"]
    shapes: Shapes = {"self_attn.o_proj.weight": (hidden, heads * width)}
    for name, count in ("q", heads), ("k", kv_heads), ("v", kv_heads):
        shapes[f"self_attn.{name}_proj.weight"] = (count * width, hidden)
        if c.get("attention_bias") or c.get("qkv_bias") or c["model_type"] == "qwen2":
            shapes[f"self_attn.{name}_proj.bias"] = (count * width,)
        if name != "v" and c["model_type"] in ("glm4_moe", "qwen3_moe", "qwen3"):
            shapes[f"self_attn.{name}_norm.weight"] = (width,)
        if name != "v" and c["model_type"] in ("olmoe", "minimax_m2"):
            shapes[f"self_attn.{name}_norm.weight"] = (count * width,)
    if c["model_type"] == "gpt_oss":
        shapes |= {"self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (heads,)}
    return shapes


def mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    gate, up, down = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def mixtral_shapes(c: Config) -> Shapes:
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    shapes: Shapes = {"block_sparse_moe.gate.weight": (experts, hidden)}
    if c.get("use_routing_bias"):
        shapes["block_sparse_moe.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        prefix = f"block_sparse_moe.experts.{expert}"
        shapes |= {f"{prefix}.w1.weight": (width, hidden), f"{prefix}.w3.weight": (width, hidden)}
        shapes[f"{prefix}.w2.weight"] = (hidden, width)
    return shapes


def gpt_oss_shapes(c: Config) -> Shapes:
    """Tensors of all experts of a layer together. The matrices are transposed; gate and up lie by turns."""
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    return {
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        "mlp.experts.down_proj": (experts, width, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def moe_shapes(c: Config) -> Shapes:
    hidden, width = c["hidden_size"], c.get("moe_intermediate_size", c["intermediate_size"])
    experts = c["num_experts"] if "num_experts" in c else c["n_routed_experts"]
    shapes: Shapes = {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= mlp_shapes(f"mlp.experts.{expert}", hidden, width)
    if "n_shared_experts" in c:
        shapes |= mlp_shapes("mlp.shared_experts", hidden, width * c["n_shared_experts"])
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if "shared_expert_intermediate_size" in c:
        shapes |= mlp_shapes("mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def gpt2_shapes(c: Config) -> Shapes:
    """Tensors of a GPT-2, by the names of its class. Its matrices are transposed."""
    hidden, layers = c["n_embd"], c["n_layer"]
    shapes: Shapes = {"wte.weight": (c["vocab_size"], hidden), "wpe.weight": (c["n_positions"], hidden)}
    matrices = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    width = c.get("n_inner") or 4 * hidden
    matrices |= {"mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
    for prefix in (f"h.{layer}" for layer in range(layers)):
        for name, shape in matrices.items():
            shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[1:]}
    norms = [f"h.{layer}.ln_{number}" for layer in range(layers) for number in (1, 2)]
    for name in (*norms, "ln_f"):
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def model_shapes(c: Config) -> Shapes:
    """Every tensor under the name that the releases give it. Multi-token prediction has a layer after the last."""
    if c["model_type"] == "gpt2":
        return gpt2_shapes(c)
    hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    dense = range(c.get("first_k_dense_replace", 0) if "num_experts_per_tok" in c else layers)
    dense = {*dense, *c.get("mlp_only_layers", ())}
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers + c.get("num_nextn_predict_layers", 0)):
        block = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        block |= attention_shapes(c)
        if layer in dense:
            block |= mlp_shapes("mlp", hidden, c["intermediate_size"])
        elif c["model_type"] == "gpt_oss":
            block |= gpt_oss_shapes(c)
        else:
            block |= mixtral_shapes(c) if c["model_type"] in ("mixtral", "minimax_m2") else moe_shapes(c)
        if layer >= layers:
            block |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "shared_head.norm.weight": (hidden,)}
            block |= {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
            block["eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    head: Shapes = {} if c["tie_word_embeddings"] else {"lm_head.weight": (vocab, hidden)}
    return shapes | {"model.norm.weight": (hidden,)} | head
