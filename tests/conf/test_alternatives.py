"""conf/alternatives.py: the release that is offered is supported, and its size is near the model's."""

import json
import re
from pathlib import Path

import pytest

from conf import families
from conf.alternatives import BRIDGED, REFUSED, closest, releases
from conf.model_facts import MODELS, facts_from_hf
from conf.planner.parameters import total
from conf.rules.conversion import not_converted

KNOWN = {
    known["source"].removesuffix(" config.json"): known["config"]
    for known in (json.loads(file.read_text()) for file in MODELS.glob("*.json"))
}
SMALL = {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1}
SMALL |= {"head_dim": 256, "intermediate_size": 2048, "vocab_size": 262144}


@pytest.mark.parametrize("name", sorted(KNOWN.keys() & (releases(True) | releases(False)).keys()))
def test_a_release_is_the_closest_to_itself_and_has_the_size_of_the_table(name):
    facts = facts_from_hf(KNOWN[name])
    table = releases(facts.experts > 0)
    assert total(facts) / 1e9 == pytest.approx(table[name], rel=0.03)
    assert f" is {name}, " in closest(KNOWN[name])


def test_a_model_of_270_million_is_not_sent_to_one_of_30_billion():
    line = not_converted({"architectures": ["Gemma2ForCausalLM"], **SMALL})
    assert line.endswith(
        "it has about 0.27 billion parameters, "
        "and the closest supported model is google/gemma-3-270m-it, which has 0.27 billion"
    )
    within = {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": SMALL}
    assert "google/gemma-3-270m-it" in not_converted(within)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": "x"}, {"n_embd": 8}, {"text_config": 7}])
def test_without_sizes_two_releases_are_offered(sizes):
    line = not_converted({"architectures": ["FalconForCausalLM"], **sizes})
    assert line.endswith("take Qwen/Qwen3-8B, or Qwen/Qwen3-30B-A3B for a model with experts")


def test_the_families_that_megatron_bridge_knows_are_those_of_the_installed_release():
    import importlib.util

    package = importlib.util.find_spec("megatron.bridge")
    if package is None or not package.submodule_search_locations:
        pytest.skip("Megatron-Bridge is not installed")
    files = [*Path(package.submodule_search_locations[0], "models").rglob("*.py")]
    text = "\n".join(file.read_text("utf-8") for file in files)
    names = dict(re.findall(r'^(_\w+_HF_CLASS_NAME) = "(\w+)"', text, re.MULTILINE))
    converted = {family.architecture: family for family in families.every().values() if not family.read_as}
    by_name = {name for name, family in converted.items() if family.by_name}
    assert by_name == {name for name in re.findall(r'\bsource="(\w+)",', text) if name in converted}
    registered = {names.get(name, name) for name in re.findall(r'\bsource="?(\w+?)"?,', text)}
    known = {name for name in registered if name.endswith("ForCausalLM")}
    assert known - REFUSED.keys() - converted.keys() == BRIDGED
