"""conf/planner/picture.py: no part of the model is left out or held by too many, and a thousand GPUs are a
screenful."""

from collections import Counter

import pytest

from conf.load import load
from conf.planner.hardware import GPUS
from conf.planner.picture import as_dict, blocks, lines, stages
from conf.planner.verdict import facts_of, plan

ONE_STAGE = ["layout.pp=1", "layout.vpp=null", "layout.etp=2"]  # of GLM-4.7: its experts are cut instead
NAMES = ["glm47", "glm47-b200", "qwen3-235b", "deepseek-v3-64", "deepseek-v3-512", "qwen2-moe", "mixtral-8x7b"]


def of(name: str, *overrides: str):
    run = load(name, overrides)
    return plan(run, facts_of(run), GPUS["h200"])


@pytest.mark.parametrize("name", [*NAMES, "llama31-405b", "llama31-70b", "gpt2-large"])
def test_all_of_the_model_is_somewhere(name):
    planned = of(name)
    run, cut, experts = planned.run, planned.cut, planned.facts.experts
    layers = [layer for stage in stages(planned) for first, last in stage["layers"] for layer in range(first, last + 1)]
    assert sorted(layers) == list(range(planned.facts.layers))
    assert [stage["rank"] for stage in stages(planned) if stage["fullest"]] == [planned.fullest.rank]
    assert stages(planned)[0]["embedding"] and stages(planned)[-1]["output"]
    # parts of a stage, by what cuts them, over all GPUs: as many copies as the grids say
    held = blocks(run, experts)
    shares = [(host, share) for of_host, hosts in held.items() for host in hosts for share in of_host]
    assert len(shares) == run.world and cut
    tp = Counter(share.tp for _, share in shares)
    assert tp == dict.fromkeys(range(1, run.layout.tp + 1), cut.dp * run.layout.cp * run.layout.pp)
    of_experts = Counter((share.experts, share.etp) for _, share in shares)
    assert {*of_experts.values()} == {cut.edp * run.layout.pp}
    firsts = sorted({share.experts[0] for _, share in shares})
    assert firsts == list(range(0, max(experts, 1), max(experts // run.layout.ep, 1)))


def test_ranks_are_numbered_as_core_does():
    """tp 2, ep 8 and etp 2 on 4 hosts: GPU 2 of host 1 is rank 10: tp 0, ep 5, etp 0."""
    held = {host: shares for shares, hosts in blocks(load("glm47", ONE_STAGE), 160).items() for host in hosts}
    one = held[1][2]
    assert (one.tp, one.experts, one.etp) == (1, (100, 119), 1)
    assert held[1] == held[3] != held[0]


def test_virtual_stages_alternate():
    first, last = stages(of("qwen2-moe"))
    assert (first["layers"], last["layers"]) == ([[0, 6], [14, 20]], [[7, 13], [21, 27]])


def test_a_thousand_gpus_are_folded():
    batch = "train.global_batch=4096"
    planned = of("deepseek-v3-512", "layout.nodes=128", batch)
    shown = list(lines(planned))
    assert planned.run.world == 1024 and len(shown) < 40 and max(map(len, shown)) <= 120
    assert sum("* fullest" in line for line in shown) >= 1
    pipeline = of(
        "llama31-405b", "layout.nodes=126", "layout.pp=126", "layout.cp=1", "layout.last_stage_layers=null", batch
    )
    shown = list(lines(pipeline))
    assert pipeline.run.world == 1008 and len(shown) < 40
    assert any("110 similar stages" in line for line in shown)


def test_programs_get_all_of_it():
    found = as_dict(of("glm47", *ONE_STAGE))
    assert found and [host["hosts"] for host in found["hosts"]] == [[0, 2], [1, 3]]
    assert found["hosts"][0]["gpus"][1] == {"stage": 0, "tp": 2, "experts": (0, 19), "etp": 2}
    assert as_dict(plan(load("glm47", ["layout.ep=7"], illegal=True), facts_of(load("glm47")), GPUS["h100"])) is None
