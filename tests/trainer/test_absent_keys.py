"""A key of config.json that is absent or null is refused, or the plan counts the parameters of transformers."""

from dataclasses import replace
from typing import Any

import pytest

from conf import families
from conf.model_facts import facts_from_hf
from conf.model_files import config_json
from conf.planner.parameters import total
from conf.rules.conversion import obstacles
from trainer.rehearsal.tiny_models import KINDS

# transformers draws no layers of multi-token prediction, and one model by every name for its kind.
LEFT = ("architectures", "model_type", "num_nextn_predict_layers", "mtp_num_hidden_layers")


def drawn(config: dict[str, Any]) -> int:
    """Parameters of transformers' model, which takes no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, rest = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(families.every()[kind].read_as or kind, **rest)
    with torch.device("meta"):
        return sum(one.numel() for one in AutoModelForCausalLM.from_config(described).parameters())


def planned(config: dict[str, Any]) -> int | None:
    """Parameters by the plan, without multi-token prediction; None if it refuses the model."""
    try:
        return None if obstacles(config) else total(replace(facts_from_hf(config), mtp_layers=0))
    except ValueError:  # in a line that begins with config.json
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_absent_or_null_is_refused_or_counted_as_transformers_counts(kind):
    config = config_json.of_text(KINDS[kind])
    count = planned(config)
    assert count is not None
    rest = drawn(config) - count
    for key in config.keys() - set(LEFT):
        absent = {name: value for name, value in config.items() if name != key}
        for changed in (absent, absent | {key: None}):
            if (count := planned(changed)) is not None:
                assert drawn(changed) - count == rest, f"{key} is {'null' if key in changed else 'absent'}"


@pytest.mark.parametrize("kind", ["deepseek-v3", "kimi-k2", "glm4-moe-lite"])
def test_a_query_of_one_matrix_is_refused_before_the_download(kind):
    (line,) = obstacles(dict(KINDS[kind]) | {"q_lora_rank": None})
    assert line.startswith("config.json: q_lora_rank is null, which cannot be converted for ")
