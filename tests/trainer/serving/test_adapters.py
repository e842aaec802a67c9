"""An adapter's file compared with its base, for a model with experts, and its name in vLLM."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.load import load
from contract.faults import Fault
from contract.served_model import ServedAdapter
from trainer.checks import inputs
from trainer.rehearsal.tiny_models import make_model
from trainer.serving.adapter_coverage import require_whole
from trainer.serving.adapters import read, require_room

RANK, EXPERTS = 8, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coverage") / "model"
    make_model("glm4-moe", folder, seed=0)
    return folder


@pytest.fixture
def adapter(model, tmp_path):
    """adapter(fault) -> a folder with an adapter of attention, dense layers and experts, changed by the fault."""

    def adapter(fault=lambda tensors: tensors) -> Path:
        names = {name for file in model.glob("*.safetensors") for name in load_file(file)}
        layers = range(json.loads((model / "config.json").read_text())["num_hidden_layers"])
        modules = {f"model.layers.{layer}.self_attn.q_proj": 1 for layer in layers}
        for layer in layers:
            stacked = f"model.layers.{layer}.mlp.experts.0.up_proj.weight" in names
            experts = {f"model.layers.{layer}.mlp.experts{inner}": EXPERTS for inner in ("", ".base_layer")}
            modules |= experts if stacked else {f"model.layers.{layer}.mlp.up_proj": 1}
        tensors = {}
        for name, count in modules.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(count * RANK, 4)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(4, count * RANK)
        save_file(fault(tensors), tmp_path / "adapter_model.safetensors")
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = {"r": RANK, "target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight", *stacks]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path

    return adapter


def without(pattern: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def without_an_expert(tensors: dict) -> dict:
    """Without the last expert of a layer. 56 rows of rank 8 would also be 8 experts of rank 7."""
    last = max(name for name in tensors if "mlp.experts.lora_A" in name)
    columns = last.replace("lora_A", "lora_B")
    return tensors | {last: tensors[last][:-RANK], columns: tensors[columns][:, :-RANK].contiguous()}


def test_a_whole_adapter_of_a_model_with_experts_is_accepted(adapter, model):
    require_whole(adapter(), model)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (without_an_expert, r"mlp\.experts: an adapter of rank 8 of 8 experts has 64 rows, this has 56 and 56$"),
        (without(r"layers\.1\.mlp\.experts"), r"layer 1 has no adapter of mlp\.experts, which adapter_config.json"),
        (without(r"layers\.0\.mlp\.up_proj"), r"layer 0 has no adapter of mlp\.up_proj, which"),
        (without(r"q_proj"), r"layer 0 has no adapter of self_attn\.q_proj and \d+ more, which"),
        (without(r"layers\.0\.self_attn\.q_proj\.lora_B"), r"q_proj: an adapter of rank 8 has 8 rows, this has only"),
    ],
)
def test_a_part_that_is_missing_is_named(adapter, model, fault, said):
    with pytest.raises(Fault, match=said):
        require_whole(adapter(fault), model)


def test_an_evaluation_refuses_it_before_vllm_starts(adapter, model, tmp_path_factory):
    export = tmp_path_factory.mktemp("export")
    run = load("tiny", [f"paths.model={model}", f"paths.export={export}", "evaluate.adapter=unmerged"])
    shutil.copytree(adapter(without_an_expert), export / "adapter")
    with pytest.raises(Fault, match=r"this has 56 and 56$"):
        inputs.check_evaluate(run)


def test_the_name_in_vllm_follows_the_content(adapter, model):
    """vLLM would answer from the keys and values of another adapter of the same name."""
    named = ServedAdapter(["tickets@1"], str(adapter()), "/data")
    first = read(named, model).name
    assert first.startswith("tickets@1:") and read(named, model).name == first
    adapter(lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()})
    assert read(named, model).name != first


def test_a_higher_rank_and_other_layers_than_at_the_start_are_refused(adapter, model):
    found = read(ServedAdapter(["tickets@1"], str(adapter()), "/data"), model)
    require_room(found, found, 1)
    with pytest.raises(Fault, match="rank 9, but the server has memory for 8; start the server with this adapter"):
        require_room(replace(found, rank=9), found, 1)
    with pytest.raises(Fault, match="adapts o_proj, but the server has memory for experts, q_proj, up_proj"):
        require_room(replace(found, layers=found.layers | {"o_proj"}), found, 1)
    with pytest.raises(Fault, match="the server has a merged model and no memory for adapters"):
        require_room(found, None, 1)
