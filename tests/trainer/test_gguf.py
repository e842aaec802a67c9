"""export.gguf: transformers reads the file as the merged model, with the same tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, TokenType
from safetensors.torch import load_file

from contract.faults import Fault
from tests.support import drawn_models
from trainer.weights.exported import gguf_tokenizer

slow = pytest.mark.slow
TOKENS = drawn_models.tokens(rows=2, length=48, vocabulary=500)
KINDS = [("llama", "f16"), ("qwen3", "q8_0"), ("qwen3-moe", "f32"), ("qwen2", "bf16")]
QUICK = ("llama", "qwen3-moe")
BOUNDS = {"f32": 1e-5, "bf16": 0.05, "f16": 5e-3, "q8_0": 0.05}  # of the largest logit


@pytest.fixture(scope="module")
def exported(configure, ranks, work):
    """exported(kind, numbers) -> the GGUF file and the folder of the merged model of a base."""

    def exported(kind: str, numbers: str) -> tuple[Path, Path]:
        folder = work / "gguf" / kind
        paths = [f"paths.{name}={folder / name}" for name in ("base", "output", "logs", "export")]
        run = configure(kind, *paths, "export.checkpoint=base", f"export.gguf={numbers}")
        for command in ("convert", "export"):
            done = ranks(command, run)
            assert done.code == 0, done.output[-3000:]
        (file,) = (folder / "export/gguf").iterdir()
        return file, folder / "export/merged"

    return exported


@pytest.mark.filterwarnings("ignore")  # of what transformers imports, and of numpy arrays that cannot be written
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [pytest.param(*row, marks=slow if row[0] not in QUICK else ()) for row in KINDS],
)
def test_transformers_computes_the_same_from_the_file(kind, numbers, exported):
    from transformers import AutoConfig, AutoModelForCausalLM

    file, merged = exported(kind, numbers)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(tokens).logits
        sizes = {"config": AutoConfig.from_pretrained(merged)}  # it reads no width of heads or of experts from a file
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **sizes)
        found = model(tokens).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < BOUNDS[numbers]
    described = json.loads((merged / "tokenizer.json").read_text())
    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    of_tokenizer = {name.removeprefix("tokenizer."): value for name, value in fields.items() if "tokenizer" in name}
    vocabulary = {token: number for number, token in enumerate(of_tokenizer["ggml.tokens"])}
    assert vocabulary == described["model"]["vocab"] | {one["content"]: one["id"] for one in described["added_tokens"]}
    assert [merge.split(" ") for merge in of_tokenizer["ggml.merges"]] == described["model"]["merges"]
    controls = {number for number, kind in enumerate(of_tokenizer["ggml.token_type"]) if kind == TokenType.CONTROL}
    assert controls == {one["id"] for one in described["added_tokens"] if one["special"]}
    assert (of_tokenizer["ggml.model"], of_tokenizer["ggml.pre"]) == ("gpt2", "gpt-2")
    assert of_tokenizer["ggml.eos_token_id"] == 0
    assert of_tokenizer["chat_template"] == (merged / "chat_template.jinja").read_text()


@slow
def test_glms_file_has_the_names_and_keys_that_llama_cpp_reads(exported):
    """transformers does not read these files."""
    file, merged = exported("glm4-moe-mtp", "f32")
    weights = {name: tensor for part in merged.glob("*.safetensors") for name, tensor in load_file(part).items()}
    reader = GGUFReader(file)
    found = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    expected = {
        f"blk.2.ffn_{leaf}_exps.weight": torch.stack(
            [weights[f"model.layers.2.mlp.experts.{number}.{leaf}_proj.weight"] for number in range(8)]
        )
        for leaf in ("gate", "up", "down")
    }
    names = {"blk.2.exp_probs_b.bias": "model.layers.2.mlp.gate.e_score_correction_bias"}
    names |= {"blk.2.ffn_gate_inp.weight": "model.layers.2.mlp.gate.weight"}
    names |= {"blk.2.ffn_down_shexp.weight": "model.layers.2.mlp.shared_experts.down_proj.weight"}
    names |= {"blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight"}
    names |= {"blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight"}
    names |= {"blk.4.nextn.eh_proj.weight": "model.layers.4.eh_proj.weight"}
    names |= {"blk.4.post_attention_norm.weight": "model.layers.4.post_attention_layernorm.weight"}
    names |= {"output.weight": "lm_head.weight", "token_embd.weight": "model.embed_tokens.weight"}
    expected |= {name: weights[other] for name, other in names.items()}
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())
    keys = {name.removeprefix("glm4moe."): field.contents() for name, field in reader.fields.items()}
    config = json.loads((merged / "config.json").read_text())
    expected = {"block_count": 5, "nextn_predict_layers": 1, "expert_count": 8, "expert_gating_func": 2}
    expected |= {"leading_dense_block_count": config["first_k_dense_replace"], "expert_shared_count": 1}
    expected |= {"rope.dimension_count": config["head_dim"] // 2, "attention.key_length": config["head_dim"]}
    assert {name: keys[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, "not a byte-level BPE with a splitting rule of GPT-2"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "not a byte-level BPE with a splitting rule"),
        ({"model": {"type": "Unigram"}}, "not a byte-level BPE"),
    ],
)
def test_other_tokenizers_are_refused_in_one_line(change, says, tmp_path):
    usual = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel", "use_regex": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(usual | change))
    with pytest.raises(Fault, match=says):
        gguf_tokenizer.check(tmp_path, "bf16")
    (tmp_path / "tokenizer.json").write_text(json.dumps(usual))
    gguf_tokenizer.check(tmp_path, "bf16")
