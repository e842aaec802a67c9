"""What a server is told of an export: where its files are, and how it was evaluated."""

from pathlib import Path

import pytest

from contract.faults import Fault
from contract.served_model import ServedModel
from tasks.serving import artifacts
from tasks.serving.artifacts import Named
from tasks.store import open_store
from tests.support.exports import evaluated, exported

WHERE = {"host": "127.0.0.1", "port": 8000, "kernels": "/nowhere"}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def served(store, made, adapter=False, gpus=False) -> ServedModel:
    sources = artifacts.collect(Named("tickets", "tickets version 1", made), store, adapter, gpus)
    return artifacts.served_model([sources], store, Path("/nowhere"), **WHERE)


def test_it_is_served_as_it_was_evaluated(store, tmp_path):
    made = exported(store, "first")
    evaluated(store, made, ["team 0"], quantization="fp8")
    evaluated(store, exported(store, "second"), ["team 0"])
    found = served(store, made)
    assert (found.precision, found.quantization, found.trust_remote_code) == ("fp32", "fp8", False)
    assert Path(found.model) == tmp_path / f"store/{made.key}/files/merged" and not found.adapters
    assert (Path(found.data) / "test.jsonl").is_file()


def test_without_an_evaluation_it_has_the_precision_of_its_weights(store):
    assert served(store, exported(store, "first")).precision == "bf16"


def test_code_of_a_model_is_run_only_where_the_download_was_allowed_to_have_it(store):
    assert served(store, exported(store, "first", trust=True)).trust_remote_code is True


@pytest.mark.parametrize("asked, merged", [(True, True), (False, False)])
def test_an_adapter_is_served_beside_the_base(store, asked, merged):
    """Where it is asked for, or nothing is merged."""
    made = exported(store, "first", adapter={}, merged=merged)
    found = served(store, made, adapter=asked)
    assert found.model.split("/")[-3] == "download" and found.adapters[0].folder.endswith(f"{made.key}/files/adapter")


@pytest.mark.parametrize(
    "adapter, gpus, said",
    [
        ({"use_dora": True}, True, "vLLM adds products, and DoRA scales the weight; serve it merged"),
        (
            {"target_modules": ["kv_b_proj"]},
            True,
            "vLLM would leave the adapter of kv_b_proj (linear_kv_up_proj) out of answers",
        ),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            False,
            "vLLM adds no adapter to a model with experts on a CPU",
        ),
        ({"target_parameters": ["mlp.experts.down_proj"]}, True, None),
        ({"target_parameters": ["mlp.shared_experts.up_proj.weight"]}, False, None),
        (None, True, "contains no adapter"),
    ],
)
def test_an_adapter_that_would_be_left_out_in_part_is_refused(store, adapter, gpus, said):
    made = exported(store, "first", adapter=adapter)
    if said is None:
        assert served(store, made, adapter=True, gpus=gpus).adapters
        return
    with pytest.raises(Fault) as refused:
        served(store, made, adapter=True, gpus=gpus)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_export_whose_data_are_gone_is_said(store):
    made = exported(store, "first")
    (key,) = {name.partition("/")[0] for name in store.keys("prepare")}
    store.remove(f"prepare/{key}/artifact.json")
    with pytest.raises(Fault, match=rf"^train/\w+ was made from prepare/{key}, which is no longer in .*$"):
        served(store, made)


def test_the_file_of_a_served_model_is_read_strictly(tmp_path):
    model = ServedModel("tickets", "m", "d", "fp32", "127.0.0.1", 8000, "k", "s")
    model.write(tmp_path / "model.json")
    assert ServedModel.read(tmp_path / "model.json") == model
    (tmp_path / "model.json").write_text('{"name": "tickets", "trust": true}')
    with pytest.raises(Fault, match="trust"):
        ServedModel.read(tmp_path / "model.json")
