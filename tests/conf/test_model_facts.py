"""conf/model_facts.py: what is read of each family's config.json, and that one which is no model's is refused by
name."""

import re

import pytest

from conf import families
from conf.model_facts import MODELS, ModelFacts, facts_from_hf
from tests.support.known_models import known

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "intermediate_size": 11008,
}
MOE = LLAMA | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}


def test_facts_of_glm():
    assert known("glm47") == ModelFacts(
        layers=92,
        hidden=5120,
        heads=96,
        kv_heads=8,
        head_dim=128,
        vocab=151552,
        ffn=12288,
        experts=160,
        top_k=8,
        expert_ffn=1536,
        shared_ffn=1536,
        dense_layers=3,
        mtp_layers=1,
        qk_norm=True,
        attention_bias=True,
        expert_bias=True,
        architecture="Glm4MoeForCausalLM",
    )


def test_facts_of_other_families():
    deepseek = known("deepseek-v3")
    assert (deepseek.q_rank, deepseek.kv_rank, deepseek.v_head, deepseek.head_dim) == (1536, 512, 128, 0)
    assert deepseek.kv_heads == deepseek.heads == 128 and deepseek.qk_norm and deepseek.expert_bias
    qwen3, qwen2 = known("qwen3-235b"), known("qwen2-moe")
    assert (qwen3.experts, qwen3.expert_ffn, qwen3.ffn, qwen3.shared_ffn, qwen3.dense_layers) == (128, 1536, 0, 0, 0)
    assert (qwen3.qk_norm, qwen3.attention_bias, qwen3.shared_gate) == (True, False, False)
    assert (qwen2.qk_norm, qwen2.attention_bias, qwen2.shared_gate, qwen2.shared_ffn) == (False, True, True, 20480)
    dense = known("qwen3-8b")
    assert (dense.qk_norm, dense.attention_bias, dense.head_dim, dense.tied) == (True, False, 128, False)
    assert (dense.ffn, dense.dense_layers, dense.experts) == (12288, 36, 0)
    mixtral = known("mixtral-8x7b")
    assert (mixtral.experts, mixtral.top_k, mixtral.expert_ffn, mixtral.ffn) == (8, 2, 14336, 0)
    llama = facts_from_hf(LLAMA)
    assert (llama.experts, llama.kv_heads, llama.head_dim, llama.dense_layers, llama.tied) == (0, 32, 128, 32, False)
    gpt2 = known("gpt2-large")
    assert (gpt2.ffn, gpt2.positions, gpt2.gated, gpt2.layernorm, gpt2.tied) == (5120, 1024, False, True, True)
    assert [gpt2.padded_vocab(tp) for tp in (1, 2)] == [50304, 50432] and llama.padded_vocab(3) == 32000


def test_a_family_without_a_name_works_by_llamas():
    assert facts_from_hf(LLAMA | {"architectures": ["MineForCausalLM"]}).ffn == 11008
    assert facts_from_hf({key: value for key, value in LLAMA.items() if key != "architectures"}).hidden == 4096
    assert facts_from_hf(LLAMA | LATENT).q_rank == 0


def test_which_layers_have_experts():
    patterns = {
        "mmmm": {},
        "dddm": {"first_k_dense_replace": 3},
        "dmdm": {"decoder_sparse_step": 2},
        "dmmd": {"mlp_only_layers": [3, 0]},
        "dddd": {"decoder_sparse_step": 5},
    }
    for pattern, keys in patterns.items():
        facts = facts_from_hf(MOE | {"num_hidden_layers": 4} | keys)
        assert "".join(kind[0] for kind in facts.kinds) == pattern
        assert bool(facts.ffn) == ("d" in pattern)
    assert set(facts_from_hf(LLAMA).kinds) == {"dense"}


def test_every_model_that_is_shipped_can_be_read():
    assert len(list(MODELS.glob("*.json"))) >= 8
    for path in MODELS.glob("*.json"):
        assert known(path.stem).layers


def test_tied_embeddings_of_a_text_model_agree_with_the_whole_model_s():
    """In transformers an absent key is true for one family with vision, and false for the other."""
    for kind, tied in ("gemma3", True), ("qwen3-5-moe", False):
        config = {key: value for key, value in families.tiny()[kind].items() if key != "tie_word_embeddings"}
        text = config.get("text_config", {})
        assert facts_from_hf(config | {"text_config": text | {"tie_word_embeddings": tied}}).tied == tied
        with pytest.raises(ValueError, match=f"is {str(tied).lower()}, but {str(not tied).lower()} in text_config"):
            facts_from_hf(config | {"text_config": text | {"tie_word_embeddings": not tied}})


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"^glm-47: no such model in conf/models; there are deepseek-v3, .*glm47, "):
        known("glm-47")


@pytest.mark.parametrize("value", [None, "92", 92.0, True, -1, 0, 2**40])
def test_facts_that_are_no_sizes(value):
    with pytest.raises(ValueError, match=r"^config.json: num_hidden_layers is .*, which is not a size from 1 to \d+$"):
        facts_from_hf(LLAMA | {"num_hidden_layers": value})


@pytest.mark.parametrize(
    "config, line",
    [
        ({}, "num_hidden_layers is null, which is not a size"),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 8}, "n_head is null, which is not a size"),
        ({"architectures": ["T5ForConditionalGeneration"], "d_model": 8}, "num_hidden_layers is null, which is not"),
        (LLAMA | {"vocab_size": -5}, "vocab_size is -5, which is not a size from 1"),
        (
            LLAMA | {"num_attention_heads": 24},
            "num_attention_heads is 24, which does not divide hidden_size, 4096, and",
        ),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide num_attention_heads, 32"),
        (LLAMA | {"num_nextn_predict_layers": 33}, "num_nextn_predict_layers is 33, but there are 32 layers"),
        (
            families.tiny()["qwen3-next-mtp"] | {"num_nextn_predict_layers": 2},
            "num_nextn_predict_layers is 2 after a layer with full_attention, but only 1 is supported, after a layer",
        ),
        (
            families.tiny()["qwen3-next-mtp"] | {"num_hidden_layers": 3},
            "num_nextn_predict_layers is 1 after a layer with linear_attention, but only 1 is supported, after a layer",
        ),
        *(
            (
                families.tiny()["nemotron-h-mtp"] | change,
                f"num_nextn_predict_layers is {found}, but only 1 of attention and moe is supported, in a model with",
            )
            for change, found in (
                ({"num_nextn_predict_layers": 2}, '2 of ["attention", "moe"] in a model with experts'),
                ({"mtp_hybrid_override_pattern": "*-"}, '1 of ["attention", "mlp"] in a model with experts'),
                ({"mtp_layers_block_type": ["moe"]}, '1 of ["moe"] in a model with experts'),
                ({"layers_block_type": ["attention"]}, '1 of ["attention", "moe"] in a model without experts'),
            )
        ),
        (LLAMA | {"head_dim": 33}, "head_dim is 33, but rotary embeddings rotate pairs"),
        (
            LLAMA | {"head_dim": 20, "partial_rotary_factor": 0.25},
            "head_dim is 20, of which partial_rotary_factor 0.25 rotates 5 numbers, but rotary embeddings rotate pairs",
        ),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is null, which is not a size from 1"),
        (MOE | {"first_k_dense_replace": 33}, "first_k_dense_replace is 33, but there are 32 layers"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, which is not a size from 1"),
        (MOE | {"mlp_only_layers": [32]}, "mlp_only_layers is [32], which is not a list of layers from 0 to 31"),
        (
            MOE | {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2},
            "decoder_sparse_step is 2, but Megatron-Bridge builds Qwen3MoeForCausalLM only with 1",
        ),
        (
            MOE | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [3]},
            "mlp_only_layers is [3], but Megatron-Bridge builds Qwen3MoeForCausalLM only with []",
        ),
        (
            MOE | LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": 0},
            "n_shared_experts is 0, but Megatron-Bridge builds this family only with shared experts",
        ),
        (LLAMA | LATENT | {"v_head_dim": None}, "v_head_dim is null, which is not a size from 1"),
    ],
)
def test_what_is_no_model(config, line):
    with pytest.raises(ValueError, match=f"^config.json: {re.escape(line)}[^\n]*$"):
        facts_from_hf(config)
