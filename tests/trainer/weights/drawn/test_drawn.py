"""trainer/weights/drawn: a model as its family begins a training, the same bytes each time."""

import json
import math

import numpy as np
import pytest
import torch

from conf.model_facts import shapes
from contract.faults import Fault
from trainer.rehearsal import tiny_models
from trainer.weights import new_safetensors, released, released_tensors
from trainer.weights.drawn import files

TOKENS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.make_tokenizer(folder, 500)
    return folder


def draw(config, tokenizer, folder, seed=1234):
    files.write(config, tokenizer, folder, seed, lambda done, total: None)
    return folder


def test_equal_arguments_give_equal_bytes_and_another_seed_others(tokenizer, tmp_path):
    config = tiny_models.KINDS["gpt2"]
    one, same, other = (draw(config, tokenizer, tmp_path / str(n), seed) for n, seed in enumerate((1, 1, 2)))
    assert (one / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    made = json.loads((one / "config.json").read_text())
    assert (made["eos_token_id"], made["pad_token_id"]) == (0, 1) and (one / "tokenizer.json").exists()


def test_values_are_these_on_every_machine():
    config = tiny_models.KINDS["llama"]
    (found,) = files.blocks(config, "model.layers.0.mlp.up_proj.weight", (256, 128), 1234)
    assert [round(float(value), 9) for value in found[:3]] == [0.014190089, -0.024117405, 0.003576182]


def test_tensors_cut_into_files_are_those_of_one_file(tokenizer, tmp_path, monkeypatch):
    config = tiny_models.KINDS["llama"] | {"dtype": "bfloat16"}
    whole = released.read(draw(config, tokenizer, tmp_path / "whole"))
    monkeypatch.setattr(new_safetensors, "SHARD", 300_000)
    parts = released.read(draw(config, tokenizer, tmp_path / "parts"))
    assert len(whole.files()) == 1 < len(parts.files())
    assert released.checksums(whole, whole.tensors) == released.checksums(parts, whole.tensors)


def test_bf16_is_rounded_as_torch_rounds():
    numbers = np.random.default_rng(0).standard_normal(10_000, np.float32)
    theirs = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().tobytes()
    ours = torch.from_numpy(numbers).to(released_tensors.DTYPES["BF16"])
    assert released_tensors.as_bytes(ours) == theirs


def test_blocks_leave_no_trace_and_the_embedding_of_padding_is_nothing(monkeypatch):
    config = tiny_models.KINDS["llama"] | TOKENS
    monkeypatch.setattr(files, "BLOCK", 1000)
    found = np.concatenate([*files.blocks(config, "model.embed_tokens.weight", (500, 128), 3)]).reshape(500, 128)
    assert not found[1].any() and (found[[0, 2]] != 0).all()
    assert abs(found.std() - 0.02) < 3e-4 and abs(found.mean()) < 3e-4


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dtype": "float64"}, "config.json: dtype: float64: drawn weights are float32, bfloat16, float16"),
        ({"vocab_size": 400}, "does not fit the model, whose vocab_size is 400"),
        ({"model_type": "lama"}, 'config.json: model_type: "lama": transformers has no such model'),
        ({"quantization_config": {"quant_method": "fp8"}}, "config.json: quantization_config: drawn weights are"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line_and_nothing_is_left(tokenizer, tmp_path, keys, said):
    with pytest.raises(Fault, match=said):
        draw(tiny_models.KINDS["llama"] | keys, tokenizer, tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in tiny_models.KINDS if k != "kimi-k2" and not k.endswith("-mtp")])
def test_names_shapes_and_spread_are_those_of_transformers(kind, tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_models.KINDS[kind]
    if text := config.get("text_config"):  # a model with vision is not drawn, but its text model is
        config = text | {"architectures": [config["architectures"][0].replace("ConditionalGeneration", "CausalLM")]}
    config = config | TOKENS | {"vocab_size": 512}
    if kind == "glm4-moe-lite":
        config["num_nextn_predict_layers"] = 0  # transformers leaves those layers out
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().save_pretrained(tmp_path / "theirs")
    theirs, ours = released.read(tmp_path / "theirs"), released.read(draw(config, tokenizer, tmp_path / "ours"))
    assert {name: one.shape for name, one in theirs.tensors.items()} == shapes(files.described_whole(config))
    for name in theirs.tensors:
        one, other = (released_tensors.read(model, name).float() for model in (theirs, ours))
        if kind == "gpt2" and name.endswith("c_proj.weight"):
            one = one / math.sqrt(2 * config["n_layer"])  # as the paper has it, and transformers means to
        deviation = float(one.std())
        if one.numel() >= 100:  # of gpt-oss's few sinks, and routers' biases, a spread says nothing
            spread = max(0.1, 6 / (2 * one.numel()) ** 0.5)  # of six deviations of so few numbers
            assert float(other.std()) == pytest.approx(deviation, rel=spread), name
        assert (float(other.std()) > 0) == (deviation > 0), name
        deviation = max(deviation, float(other.std()))  # of few numbers, either may be far too small
        assert float(other.mean()) == pytest.approx(
            float(one.mean()),
            abs=max(1e-6, 6 * deviation * (2 / one.numel()) ** 0.5),  # both are drawn
        )
        assert [not row.any() for row in other[:2]] == [not row.any() for row in one[:2]]
