"""conf/overrides.py: a form's changes are checked as the configuration is, and arrive there unchanged."""

import json

import pytest
from pydantic import ValidationError

from conf.load import load
from conf.overrides import Changes, as_overrides, from_overrides
from conf.schema.run import sections
from contract.faults import ConfigError


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"lr": 0}},
        {"optimizer": {"lr": 1.5}},
        {"optimizer": {"lr": "fast"}},
        {"optimizer": {"lr": float("nan")}},
        {"optimizer": {"eps": float("inf")}},
        {"optimizer": {"learning_rate": 1e-3}},
        {"optimiser": {"lr": 1e-3}},
        {"train": {"steps": 0}},
        {"train": {"steps": 1.5}},
        {"train": {"precision": "fp8"}},
        {"adapter": {"targets": ["linear_qvk"]}},
        {"export": {"checkpoint": 0}},
        {"model": {"source": ""}},
        {"paths": {"output": "/tmp"}},
        {"name": "other"},
        {"optimizer": 3},
    ],
    ids=json.dumps,
)
def test_what_the_configuration_would_refuse_is_refused(changes):
    with pytest.raises(ValidationError):
        Changes.model_validate(changes)


def test_every_key_is_there_and_optional():
    assert Changes.model_fields.keys() == sections().keys() - {"paths"}
    assert as_overrides(Changes()) == as_overrides(None) == as_overrides({}) == []
    for name, kind in sections().items() - {("paths", sections()["paths"])}:
        part = Changes.model_validate({name: {}})
        assert getattr(part, name).__class__.model_fields.keys() == kind.model_fields.keys()
        assert as_overrides(part) == as_overrides({name: {}}) == []


def test_a_form_has_help_limits_and_choices():
    schema = Changes.model_json_schema()["$defs"]
    lr = schema["Optimizer"]["properties"]["lr"]
    assert lr["description"].startswith("highest learning rate")
    assert (lr["exclusiveMinimum"], lr["maximum"], lr["type"]) == (0, 1, "number") and "anyOf" not in lr
    assert schema["Train"]["properties"]["precision"]["enum"] == ["fp32", "bf16", "fp16"]


VALUES = {
    "optimizer": {"lr": 1e-05, "eps": 1e-30, "beta1": 0.0, "distributed": False},
    "train": {"steps": 10**7, "recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "data": {"template": "Q: {input} # \"quoted\" 'too'\n\tA: \\ {output}", "source": "grün 😀, [a]: {b}"},
    "model": {"revision": "1e-4"},
    "promote": {"metric": "null", "model": "010"},
    "track": {"experiment": "yes", "wandb": "~"},
    "evaluate": {"tasks": ["a: b", "-", "#x"], "rows": 7},
    "export": {"checkpoint": 3},
}


@pytest.mark.parametrize("form", [Changes.model_validate, dict])
def test_values_arrive_as_they_were_given(form):
    run = load("tiny", as_overrides(form(VALUES)))
    for name, values in VALUES.items():
        for key, value in values.items():
            found = getattr(getattr(run, name), key)
            assert (list(found) if isinstance(found, tuple) else found) == value, f"{name}.{key}"


def test_a_form_s_nulls_say_nothing():
    assert as_overrides(Changes.model_validate({"data": {"rows": None}, "train": {"steps": 7}})) == ["train.steps=7"]


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1e-3",
        "data.rows=null",
        "name=other",
        "data.source=yes",
        "export.formats=[merged]",
        "model.revision=a=b",
        "promote.model='010'",
        "train.stop_after=5",
        "optimizer.lr=.001",
    ],
)
def test_a_command_line_s_overrides_mean_the_same_on_the_way_through(override):
    assert load("tiny", as_overrides(from_overrides([override]))) == load("tiny", [override])


def test_lines_and_parameters_mean_what_the_command_line_means():
    assert as_overrides("train.steps=7\n\n  optimizer.warmup=0.1 \n") == ["train.steps=7", "optimizer.warmup=0.1"]
    found = as_overrides({"train": {"global_batch": 8}}, model="a: b", learning_rate=1e-3, epochs=None, rank=4)
    assert found == ["train.global_batch=8", 'model.source="a: b"', "optimizer.lr=0.001", "adapter.rank=4"]
    assert load("tiny", [*found, "train.micro_batch=8"]).model.source == "a: b"
    with pytest.raises(ConfigError, match=r"optimizer\.lr: set twice"):
        load("tiny", as_overrides("optimizer.lr=1e-3", learning_rate=1e-3))
