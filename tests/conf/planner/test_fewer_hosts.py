"""conf/planner/fewer_hosts.py: the same run on fewer hosts, and keys that need less memory."""

from dataclasses import replace

import pytest

from conf.load import load
from conf.planner.fewer_hosts import fewer_hosts, less_memory, shrunk
from conf.planner.hardware import read as read_gpu
from conf.planner.verdict import plan
from conf.rules.layout import problems
from tests.support.known_models import known

GLM = load("glm47")


@pytest.mark.parametrize("name", ["glm47", "glm47-b200", "qwen3-235b", "deepseek-v3-64", "llama31-70b"])
def test_a_shrunk_run_is_the_same_run(name):
    run = load(name)
    for nodes in range(1, run.layout.nodes):
        fewer = shrunk(run, nodes)
        if fewer is None:
            continue
        assert problems(fewer) == [] and fewer.layout.nodes == nodes
        kept = fewer.model_copy(update={"layout": run.layout})
        assert kept == run


def test_a_shrunk_run_fits_or_is_none():
    facts = known("glm47")
    just_enough = replace(read_gpu("h100"), memory=plan(GLM, facts, read_gpu("h100")).fullest.total)
    assert shrunk(GLM, 2, facts, read_gpu("h200"))
    assert shrunk(GLM, 2, facts, just_enough) is None  # half the ranks to shard the optimizer over


def test_advice_is_a_configuration_that_takes_less():
    said = less_memory(GLM)
    changes = said.removeprefix("try ").partition(": ")[0].split()
    assert changes and load("glm47", changes)
    assert "GB instead of" in said
    assert less_memory(load("tiny", ["hardware.gpu=h100"])).startswith("no layout of 1 h100 needs less")
    assert less_memory(GLM.model_copy(update={"model": GLM.model.model_copy(update={"source": "x/y"})})).startswith(
        "no advice"
    )


def test_a_run_shrinks_only_down_to_min_nodes():
    assert [nodes for nodes in range(1, 5) if fewer_hosts(GLM)(nodes)] == []
    assert [nodes for nodes in range(1, 5) if fewer_hosts(load("glm47", ["gang.min_nodes=1"]))(nodes)] == [2]
    assert [nodes for nodes in range(1, 5) if fewer_hosts(load("glm47", ["gang.min_nodes=3"]))(nodes)] == []
