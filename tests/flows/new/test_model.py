"""flows/new/model.py and rows.py: what is fetched to look at a model and at rows, and what cannot be had."""

import json

import pytest
from huggingface_hub import constants

from conf.load import load
from conf.model_facts import shapes
from conf.schema.model import Model as ModelSection
from contract.faults import Fault
from contract.first_rows import FirstRows
from flows.new import model, rows
from tests.support import small_model, stand_in_hub

TOKEN = "hf_of_somebody"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "agents").write_text('{"harnesses": {}}')  # else huggingface_hub asks huggingface.co for it
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"))
    with stand_in_hub.serve(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        small_model.write(tmp_path / "model")
        server.publish("models/org/open", tmp_path / "model")
        server.publish("models/org/gated", tmp_path / "model", gated=True)
        server.tokens[TOKEN] = {"models/org/gated"}
        yield server


def test_of_a_model_on_the_hub_come_its_description_and_no_weights(hub, tmp_path):
    found = model.read(ModelSection(source="org/open"), tmp_path / "fetched")
    assert (found.source, found.context, found.shown) == ("org/open", 128, "open")
    assert found.parameters == sum(map(_numel, shapes(small_model.CONFIG).values()))
    assert (
        found.tokenizer
        and (found.tokenizer / "tokenizer.json").is_file()
        and not [*found.tokenizer.glob("*.safetensors")]
    )
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def _numel(shape) -> int:
    return shape[0] * (_numel(shape[1:]) if len(shape) > 1 else 1)


@pytest.mark.parametrize(
    "source, revision, complaint",
    [
        ("org/gated", "main", "gated: request access at .* then `hf auth login`, or set HF_TOKEN"),
        ("org/none", "main", "no such model"),
        ("org/open", "v2", "no revision 'v2' .*; it has main"),
    ],
)
def test_models_that_the_hub_does_not_give(hub, tmp_path, source, revision, complaint):
    with pytest.raises(Fault, match=complaint):
        model.read(ModelSection(source=source, revision=revision), tmp_path / "fetched")


def test_a_token_opens_a_gated_model(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert model.read(ModelSection(source="org/gated"), tmp_path / "fetched").facts.experts == 4


def test_code_of_a_repository_is_asked_for(hub, tmp_path):
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModel": "x.Y"}}))
    hub.publish("models/org/coded", tmp_path / "model")
    with pytest.raises(Fault, match="requires code of the repository"):
        model.read(ModelSection(source="org/coded"), tmp_path / "fetched")


def test_of_rows_on_s3_the_first_object_comes_and_counts_for_all(tmp_path, monkeypatch):
    sizes = {"b.jsonl": (300, "x"), "a.jsonl": (100, "y")}
    fetched, looked = {}, []
    monkeypatch.setattr(rows.row_sources, "row_objects", lambda source, key: (source, sizes))
    monkeypatch.setattr(rows.hub, "fetch_objects", lambda uri, objects, folder: fetched.update(objects))

    def first_rows(command, log, *_, **__):
        looked.append(load(command[1]).data.source)
        seen = {"kind": "pairs", "reason": "", "columns": {}, "rows": 50, "whole": True, "read": 50}
        FirstRows(**seen, tokens=[1], answers=[1], places=[0.5]).write(log.with_name("first_rows.json"))

    monkeypatch.setattr(rows.launch, "process", first_rows)
    run = load("tiny", ["data.source=s3://bucket/rows"])
    found = rows.look(run, None, tmp_path / "look")
    assert fetched == {"a.jsonl": (100, "y")} and looked == [str(tmp_path / "look/rows/a.jsonl")]
    assert (found.rows, found.whole, found.places) == (200, False, [])
