"""conf/families: the tensors of each tiny model are those of transformers and of Megatron, which are built without
memory."""

import json
import subprocess
import sys
from typing import Any

import pytest

from conf import families
from conf.families.parts.tensors import COPY
from conf.model_facts import facts_from_hf, shapes
from conf.planner import parameters

KINDS = families.tiny()


def by_transformers(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes as transformers writes them to files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from trainer.patches import families as patches

    patches.install(config["model_type"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**families.as_text(config)))
    return {name: tuple(one.shape) for name, one in revert_weight_conversion(model, model.state_dict()).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_transformers(kind):
    config, facts = KINDS[kind], facts_from_hf(KINDS[kind])
    theirs = by_transformers(config)
    if facts.tied:
        del theirs["lm_head.weight"]
    left = tuple(f"model.layers.{facts.layers + layer}." for layer in range(facts.mtp_layers))
    left += (*families.of(config).unused(facts, "model."), *filter(None, [families.of(config).ahead]))
    ours = {name: shape for name, shape in shapes(config, theirs).items() if not (left and name.startswith(left))}
    assert ours == theirs


@pytest.fixture(scope="module")
def megatrons() -> dict[str, tuple[list[str], int]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.ranks.released_names"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_megatron(kind, megatrons):
    facts = facts_from_hf(KINDS[kind])
    tensors = families.of(KINDS[kind]).tensors(facts)
    copies = {name for name, tensor in tensors.items() if tensor.kind == COPY}
    names, count = megatrons[kind]
    assert tensors.keys() - copies == {*names}
    pads = (facts.padded_vocab(1) - facts.vocab) * facts.hidden
    assert count == parameters.total(facts) - sum(tensors[name].size for name in copies) + pads
