"""train.recompute_first: memory and time lie between those of no and of full recompute, and meet both."""

from itertools import pairwise

import pytest

from conf.load import load
from conf.planner.hardware import GPUS
from conf.planner.memory import memory
from conf.planner.timing import timing
from contract.faults import ConfigError
from tests.support.known_models import known

FULL = ("train.recompute=full", "train.recompute_modules=[]")


def planned(name: str, model: str, *settings: str) -> tuple[int, float]:
    """Bytes that the fullest stage keeps from forward to backward, and seconds of a step."""
    run = load(name, ["model.mtp=false", *settings])
    facts = known(model)
    return max(stage.activations for stage in memory(run, facts, GPUS["h200"])), timing(run, facts, GPUS["h200"]).likely


@pytest.mark.parametrize(
    "name, model, most",
    [("glm45-air-8xh200", "glm45-air", 46), ("glm47", "glm47", 92), ("llama31-70b", "llama31-70b", 80)],
)
def test_more_recomputed_layers_keep_less_and_take_longer(name, model, most):
    layout = load(name).layout
    each = most // (layout.pp * (layout.vpp or 1))
    found = [planned(name, model, *FULL, f"train.recompute_first={first}") for first in (1, each // 2 or 1, each)]
    found = [planned(name, model, "train.recompute=none", "train.recompute_modules=[]"), *found]
    assert all(one[0] >= other[0] and one[1] <= other[1] for one, other in pairwise(found)), found
    assert found[-1] == pytest.approx(planned(name, model, *FULL)) and found[0][0] > found[-1][0]


@pytest.mark.parametrize("settings", [["train.recompute=none"], [*FULL, "train.recompute_layers=2"]])
def test_it_goes_with_full_recompute_of_single_layers(settings):
    with pytest.raises(ConfigError, match="recompute_first"):
        load("tiny", [*settings, "train.recompute_first=2"])
