"""tasks/pages/deployment_form.py and conf/overrides.py: help in Prefect's form, and the answer to a wrong value."""

import re

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from conf.load import load
from flows.finetune import finetune
from flows.pretrain import pretrain
from tasks.pages import deployment_form

SCHEMA = deployment_form.with_values(parameter_schema(finetune).model_dump(), load("tiny"))


def descriptions() -> dict[str, str]:
    found = SCHEMA["definitions"].items()
    return {f"{kind}.{key}": e.get("description", "") for kind, d in found for key, e in d["properties"].items()}


def test_each_key_says_what_it_is_and_what_the_preset_has():
    told, rate = descriptions(), load("tiny").optimizer.lr
    assert told["Optimizer.lr"].startswith("highest learning rate") and told["Optimizer.lr"].endswith(f"tiny: {rate}")
    assert r'in tiny: \["linear\_qkv", ' in told["Adapter.targets"]


def test_no_star_or_underscore_is_taken_for_markdown():
    assert not [key for key, text in descriptions().items() if re.search(r"(?<!\\)[*_]", text)]
    assert r"not a factor of tp \* cp \* pp \* dp" in descriptions()["Layout.ep"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"optimizer": {"lr": 5}}, "'changes.optimizer.lr'. Failure reason: 5 is greater than the maximum of 1"),
        ({"optimizer": {"decay": "cosin"}}, "'cosin' is not one of ['cosine', 'linear', 'constant']"),
        ({"train": {"stps": 1}}, "('stps' was unexpected)"),
        (3, "'changes'. Failure reason: 3 is not valid"),
    ],
)
def test_a_wrong_value_is_refused_in_words(changes, said):
    with pytest.raises(ValidationError) as refused:
        validate({"conf": "tiny", "changes": changes}, SCHEMA, raise_on_error=True)
    assert said in str(refused.value)


def test_the_form_is_short_and_each_field_has_help_and_the_limits_of_its_key():
    properties = SCHEMA["properties"]
    assert [*properties] == [
        *("conf", "model", "data", "learning_rate", "epochs", "rank", "changes", "from_stage", "until_stage")
    ]
    assert all(entry["description"] for entry in properties.values())
    assert properties["learning_rate"]["maximum"] == 1 and properties["rank"]["type"] == "integer"
    rate = load("tiny").optimizer.lr
    assert properties["learning_rate"]["description"] == (
        f"Highest learning rate, reached after warmup (optimizer.lr) \N{EM DASH} in tiny: {rate}"
    )
    assert not {"null"} & {kind.get("type") for entry in properties.values() for kind in entry.get("anyOf", ())}
    text, every = properties["changes"]["anyOf"]
    assert text["type"] == "string" and every == deployment_form.CHANGES


def test_an_error_of_the_tab_with_every_key_stands_at_the_key():
    errors = validate({"changes": {"optimizer": {"lr": 5}}}, SCHEMA)
    assert "5 is greater than the maximum of 1" in [error.message for error in errors]


@pytest.mark.parametrize("flow, conf", [(finetune, "tiny"), (pretrain, "tiny-pretrain")])
def test_lines_of_keys_are_taken(flow, conf):
    schema = deployment_form.with_values(parameter_schema(flow).model_dump(), load(conf))
    parameters = {"conf": conf, "data": "rows.jsonl", "changes": "train.steps=3\noptimizer.lr=1e-3"}
    assert validate(parameters, schema, raise_on_error=True) == []


def test_a_switch_that_nobody_touched_is_not_sent_as_off():
    properties = [entry for kind in SCHEMA["definitions"].values() for entry in kind["properties"].values()]
    assert not [entry for entry in properties if entry.get("type") == "boolean" and entry.get("default") is None]


@pytest.mark.parametrize("changes", [{}, {"optimizer": {}}, {"model": {"mtp": None}}, {"optimizer": {"lr": 1e-4}}])
def test_what_is_not_set_says_nothing(changes):
    assert validate({"changes": changes}, SCHEMA, raise_on_error=True) == []
