"""GPT-2: learned positions, LayerNorm, biases everywhere, and matrices that are stored as (inputs, outputs).

Megatron pads the vocabulary of 500 of the tiny model, like the 50257 of the releases.
"""

from conf.families.parts.family import Family
from conf.families.parts.keys import Keys
from conf.families.parts.sizes import ModelFacts
from conf.families.parts.tensors import ROOT, Tensor, Tensors


def facts(keys: Keys) -> ModelFacts:
    hidden, heads, layers = (keys.size(name, least=1) for name in ("n_embd", "n_head", "n_layer"))
    return ModelFacts(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=keys.head_dim("n_embd", "n_head"),
        vocab=keys.size("vocab_size", least=1),
        ffn=keys.size("n_inner", default=4 * hidden, least=1),
        dense_layers=layers,
        gated=False,
        attention_bias=True,
        linear_bias=True,
        layernorm=True,
        tied=keys.config.get("tie_word_embeddings") is not False,
        positions=keys.size("n_positions", least=1),
        vocab_pad=128,  # 50257, the vocabulary of the releases, cannot be divided evenly
    )


def layer(facts: ModelFacts, kind: str) -> Tensors:
    hidden, width = facts.hidden, facts.ffn
    return [
        *_norm("ln_1", hidden),
        *_linear("attn.c_attn", hidden, 3 * hidden, "attention", "linear_qkv"),
        *_linear("attn.c_proj", hidden, hidden, "attention", "linear_proj"),
        *_norm("ln_2", hidden),
        *_linear("mlp.c_fc", hidden, width, "mlp", "linear_fc1"),
        *_linear("mlp.c_proj", width, hidden, "mlp", "linear_fc2"),
    ]


def ends(facts: ModelFacts) -> tuple[Tensors, Tensors]:
    words = Tensor(f"{ROOT}wte.weight", (facts.vocab, facts.hidden), "embedding")
    positions = Tensor(f"{ROOT}wpe.weight", (facts.positions, facts.hidden), "embedding")
    head = [] if facts.tied else [Tensor("lm_head.weight", (facts.vocab, facts.hidden), "output")]
    return [words, positions], [*_norm(f"{ROOT}ln_f", facts.hidden), *head]


def _norm(name: str, width: int) -> Tensors:
    return [Tensor(f"{name}.{leaf}", (width,), "norms") for leaf in ("weight", "bias")]


def _linear(name: str, into: int, out: int, kind: str, part: str) -> Tensors:
    return [Tensor(f"{name}.weight", (into, out), kind, part, turned=True), Tensor(f"{name}.bias", (out,), kind, part)]


FAMILY = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read={"n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "layer_norm_epsilon", "tie_word_embeddings"}
    | {"resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn"}  # dropout, and the order of sums
    | {"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"},
    assumed={"activation_function": ("gelu_new",), "scale_attn_weights": (True,)}
    | {"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    defaults={"tie_word_embeddings": True},
    repeats={"n_ctx": "n_positions"},
    not_null=("activation_function", "layer_norm_epsilon"),
    facts=facts,
    layer=layer,
    ends=ends,
    roots=("transformer.", ""),  # OpenAI's own releases have none
    embedding="wte.weight",
    layers_in="h",
    names={"num_hidden_layers": "n_layer", "hidden_size": "n_embd"},
    narrow=("c_proj.weight",),  # as in the paper; transformers 5.12 looks for a name that no tensor has
    zero_padding=False,
)
