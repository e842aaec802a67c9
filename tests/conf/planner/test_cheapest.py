"""The cheapest hardware for all stages of a run, and the keys that give it."""

import pytest

from conf.load import load
from conf.planner import display, hardware
from conf.planner.cheapest import with_cheapest
from conf.planner.search import Memo, fastest
from conf.planner.timing import least
from conf.planner.verdict import facts_of, plan, settle


def planned(name: str, *overrides: str):
    run = load(name, overrides)
    facts, gpu = facts_of(run), hardware.of(run)
    return with_cheapest(plan(settle(run, facts, gpu), facts, gpu), run)


@pytest.mark.parametrize(
    "name, gpus",
    [("glm45-air-8xh100", (1, "h200")), ("glm47-2xh200", (2, "h200")), ("llama31-8b-full-8xh100", (4, "rtx4090"))],
)
def test_the_keys_of_the_line_give_its_price_and_it_is_lower(name, gpus):
    found = planned(name)
    best = found.cheapest
    assert best and (best.gpus, best.gpu) == gpus and best.cost < sum(need.cost or 0 for need in found.needs)
    here = planned(name, *best.keys.split())
    assert here.fits and not here.unserved and here.gpu.name == best.gpu
    assert sum(need.cost or 0 for need in here.needs) == pytest.approx(best.cost)
    line = next(line for line in display.lines(found) if line.startswith("cheapest"))
    assert line.endswith(f" USD for all stages: {best.gpus} {best.gpu}: {best.keys}")


def test_several_hosts_are_tried_if_no_host_is_enough():
    best = planned("llama31-405b").cheapest
    assert best and best.gpus > 8


def test_the_run_itself_may_be_the_cheapest_and_a_price_decides():
    (line,) = (line for line in display.lines(planned("deepseek-v3-8xh200")) if line.startswith("cheapest"))
    assert line.endswith("this, 8 h200")
    dear = planned("qwen3-32b-1xh200", "hardware.price=100").cheapest
    assert dear and dear.gpu != "h200" and "hardware.price=null" in dear.keys


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-8xh100", "llama31-8b-full-8xh100"])
def test_gpus_that_share_values_are_searched_as_if_alone(name):
    run = load(name)
    facts, memo, kinds = facts_of(run), Memo(), [hardware.GPUS[name] for name in ("h100", "l40s", "b200", "h200")]
    alone = [fastest(run, facts, gpu, 8, simple=True) for gpu in kinds]
    assert [fastest(run, facts, gpu, 8, simple=True, memo=memo) for gpu in kinds] == alone
    bounds = Memo()
    assert [least(run, facts, gpu, bounds) for gpu in kinds] == [least(run, facts, gpu, Memo()) for gpu in kinds]
    assert len({found and found.seconds for found in alone}) == len(kinds)


def test_nothing_is_searched_on_a_cpu_or_for_unknown_steps():
    assert planned("tiny").cheapest is None
    assert planned("glm47", "train.steps=null", "train.epochs=1").cheapest is None
