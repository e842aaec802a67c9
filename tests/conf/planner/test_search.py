"""conf/planner/search.py: what it offers is legal and fits, the best comes first, and it is quick."""

from dataclasses import replace
from itertools import pairwise

import pytest

from conf.load import load
from conf.planner import hardware
from conf.planner.hardware import GIB, GPUS
from conf.planner.memory import memory
from conf.planner.search import Memo, changes, fastest, search
from conf.planner.timing import least, timing
from conf.planner.verdict import facts_of
from conf.rules.layout import problems
from contract.faults import ConfigError
from tests.support.core_speed import seconds_of, slowdown
from tests.support.known_models import known

H100 = GPUS["h100"]


@pytest.mark.parametrize("keys", [[], ["train.cuda_graphs=true", "train.recompute=none"]])
def test_what_it_offers_is_legal_fits_and_is_sorted(keys):
    run, facts = load("glm47", keys), known("glm47")
    found = search(run, facts, H100, 32)
    assert found.fitting and found.reasons
    for one in found.fitting[:: max(1, len(found.fitting) // 40)]:
        tried = one.applied(run)
        assert not problems(tried, facts) and one.layout.world == 32
        # the same figures as those of a plan by itself: nothing is shared that should not be
        fullest = max(memory(tried, facts, H100), key=lambda stage: stage.over)
        assert (fullest.total, fullest.over) == (one.memory, one.over) and one.over <= 0
        assert timing(tried, facts, H100).likely == one.seconds
        assert one.train.global_batch == run.train.global_batch and one.verdict.startswith("fits, ")
    assert all(a.seconds <= b.seconds for a, b in pairwise(found.fitting))


def test_the_whole_batch_on_more_gpus_than_it_has_sequences_needs_other_cuts():
    found = search(load("glm47"), known("glm47"), H100, 64)
    assert all(one.layout.tp * one.layout.cp * one.layout.pp >= 4 for one in found.fitting)
    assert any("train.global_batch 16 is not a multiple of dp" in reason for reason in found.reasons)
    assert "illegal: layout.ep: 64 does not divide the 160 experts" in found.reasons


def test_offloads_only_what_does_not_fit_otherwise():
    """70B in full on 8 H100: 12 bytes a parameter for the optimizer are 105 GB a GPU."""
    run, facts = load("llama31-70b", ["adapter.kind=none", "layout.nodes=1", "layout.pp=1"]), known("llama31-70b")
    found = search(run, facts, H100, 8)
    assert found.fitting and all(one.optimizer.offload == 1 for one in found.fitting)
    best = found.fitting[0].applied(run)
    assert best.optimizer.offload == 1 and not problems(best, facts)
    assert max(stage.total for stage in memory(best, facts, H100)) == found.fitting[0].memory
    assert any(one.optimizer.offload == 0.5 for one in search(run, facts, GPUS["h200"], 8).fitting)
    for one in (one for one in search(run, facts, H100, 64).fitting if one.optimizer.offload):
        kept = one.applied(run).model_copy(update={"optimizer": run.optimizer})
        assert max(stage.over for stage in memory(kept, facts, H100)) > 0
    for stays in ("optimizer.states=bf16", "optimizer.distributed=false"):
        kept = load("llama31-70b", ["adapter.kind=none", "layout.nodes=1", "layout.pp=1", stays])
        assert all(one.optimizer.offload == 0 for one in search(kept, facts, H100, 8).fitting)


def test_what_the_gpu_cannot_compute_is_all_there_is_to_say():
    found = search(load("glm47", ["train.fp8=mxfp8"]), known("glm47"), H100, 32)
    assert not found.fitting
    line = "train.fp8: mxfp8 is not supported by h100; it supports current, delayed, blockwise"
    assert dict(found.reasons) == {f"illegal: {line}": 1}


def test_says_why_nothing_fits():
    found = search(load("glm47"), known("glm47"), H100, 8)
    assert not found.fitting and found.closest
    assert found.closest.over > 0 and found.closest.verdict.startswith("does not fit by ")
    assert any(reason.startswith("does not fit") for reason in found.reasons)


def test_more_memory_fits_more():
    run, facts = load("glm47"), known("glm47")
    fitting = [len(search(run, facts, replace(H100, memory=size * GIB), 32).fitting) for size in (60, 80, 280)]
    assert fitting == sorted(fitting) and fitting[0] < fitting[-1]


def test_stages_that_do_not_share_evenly_end_with_fewer():
    """61 layers of DeepSeek-V3 are shared by no number of stages: the last has what is left."""
    found = search(load("glm47", ["train.global_batch=256"]), known("deepseek-v3"), H100, 256)
    uneven = [one.layout for one in found.fitting if one.layout.pp > 1]
    assert uneven and all(layout.last_stage_layers for layout in uneven)
    assert all((layout.last_stage_layers or 61) <= -(-61 // layout.pp) for layout in uneven)


def test_the_fastest_layout_joins_short_packs():
    """A micro batch of one pack of 512 tokens leaves the GPU waiting for its host."""
    keys = ["data.packed=true", "data.seq_length=512", "train.global_batch=128"]
    run, facts = load("qwen3-30b-a3b-1xh100", keys), known("qwen3-30b-a3b")
    best = fastest(run, facts, H100, 1)
    assert best and best.train.micro_batch * 512 >= 8192


@pytest.mark.parametrize("name", ["qwen3-235b", "deepseek-v3-8xh200", "nemotron3-super-4xh100"])
def test_no_layout_is_faster_than_its_bound_and_so_the_best_is_found(name):
    run = load(name)
    facts, gpu, memo = facts_of(run), hardware.of(run), Memo()
    found = search(run, facts, gpu, run.world)
    assert all(least(one.applied(run), facts, gpu, memo) <= one.seconds for one in found.fitting)
    best = fastest(run, facts, gpu, run.world)
    assert best and best.seconds == next(one.seconds for one in found.offered if not one.tight)


def test_dense_models_have_no_expert_degrees():
    found = search(load("glm47", ["adapter.experts=shared"]), known("llama31-70b"), H100, 16)
    assert found.fitting and all(one.layout.ep == one.layout.etp == 1 for one in found.fitting)


@pytest.mark.parametrize("gpus", [0, -8, 12])
def test_refuses_gpus_that_are_no_hosts(gpus):
    with pytest.raises(ConfigError, match=f"^gpus: {gpus} is neither up to 8, one h100 host, nor a multiple of it$"):
        search(load("glm47"), known("glm47"), H100, gpus)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("deepseek-v3", "none"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [("glm47", "lora"), ("llama31-405b", "none")]),
    ],
)
def test_a_thousand_gpus_take_seconds(name, kind):
    run = load("glm47", ["train.global_batch=1024", f"adapter.kind={kind}"])
    found = []
    before = slowdown()
    taken = seconds_of(lambda: found.append(search(run, known(name), H100, 1024)))
    assert taken < 5 * max(before, slowdown())
    assert found[0].fitting


@pytest.mark.parametrize(
    "keys",
    [
        ["layout.tp=2", "layout.sp=true", "train.overlap_tp=true", "train.recompute=none"],
        ["train.cuda_graphs=true", "train.recompute=none"],
    ],
)
def test_every_layout_that_is_offered_can_be_asked_for_by_its_keys(keys):
    shared = ["layout.gpus_per_node=2", "train.global_batch=64", "optimizer.distributed=true", *keys]
    run = load("gpt2-large", shared)
    found = search(run, known("gpt2-large"), GPUS["h200"], 2).offered
    named = [changes(run, one.applied(run)).split() for one in found]
    for more in named:
        asked = dict(key.split("=", 1) for key in (*shared, *more))
        load("gpt2-large", [f"{key}={value}" for key, value in asked.items()])
    assert any(key in ("train.overlap_tp=false", "train.cuda_graphs=false") for more in named for key in more)
