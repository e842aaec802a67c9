"""conf/rules/pretraining.py: which runs begin with drawn weights, and what goes with them."""

import json

import pytest

from conf.load import load
from conf.planner import verdict
from conf.rules import pretraining
from conf.schema.model import Drawn
from contract.faults import ConfigError, Fault

KEYS = json.dumps({"model_type": "llama"})


def test_a_config_json_stands_for_drawn_weights_however_it_is_named(tmp_path):
    (tmp_path / "config.json").write_text(KEYS)
    named = [f"model.source={{config: {tmp_path}}}", f"model.source={tmp_path}/config.json", f"model.source={tmp_path}"]
    for source in named:
        run = load("tiny-pretrain", [source])
        assert isinstance(run.model.source, Drawn) and pretraining.is_drawn(run), source
        assert verdict.config_of(run)[0] == {"model_type": "llama"}
    assert isinstance(load("tiny-pretrain", [f"model.source={{config: {KEYS}}}"]).model.source, Drawn)


def test_a_folder_with_weights_is_a_released_model_and_so_is_one_for_an_adapter(tmp_path):
    (tmp_path / "config.json").write_text(KEYS)
    assert not pretraining.is_drawn(load("tiny", [f"model.source={tmp_path}"]))  # the plan reads its config.json alone
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert not pretraining.is_drawn(load("tiny-pretrain", [f"model.source={tmp_path}", "model.tokenizer=null"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("adapter.kind=lora", "adapter.kind: lora, but drawn weights have to be trained themselves; none"),
        ("model.tokenizer=null", "model.tokenizer: required with the keys of a config.json"),
        ("model.source=org/name", "model.tokenizer: tiny://llama, but org/name has a tokenizer"),
        (
            "model.source={config: {}}",
            "a section: not a model's name, folder or URI, or a section with",
        ),
        ("model.source={seed: 1}", "a section: not a model's name"),
        ("evaluate.quantization=fp8", "evaluate.quantization: fp8 is compared with the base's answers"),
    ],
)
def test_what_does_not_go_with_drawn_weights_is_said_in_a_line(override, said):
    with pytest.raises(ConfigError, match=rf"{override.partition('=')[0]}|model.tokenizer") as error:
        load("tiny-pretrain", [override, "train.precision=bf16"])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("tiny", "train.steps=9", "adapter.kind: lora, but pretraining trains every weight"),
        ("tiny-pretrain", "data.shape=pairs", "data.shape: pairs, but pretraining reads texts"),
        ("tiny-pretrain", "promote.metric=held_out/exact_match", "texts have no answers; held_out/perplexity"),
        (
            "tiny-pretrain",
            "reinforce.steps=3",
            "reinforce.steps: 3, but only flows.finetune has reinforcement learning",
        ),
    ],
)
def test_the_flow_refuses_what_is_no_pretraining(name, override, said):
    with pytest.raises(Fault, match=said):
        pretraining.require(load(name, [override, "reinforce.max_tokens=8"]))
