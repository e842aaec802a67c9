"""A run over several hosts is converted and exported by one: at a layout that is legal there."""

import pytest

from conf.load import FOLDER, load
from conf.planner.stage_needs import on_one_host
from conf.rules.layout import problems

SEVERAL = [path.stem for path in FOLDER.glob("*.yaml") if load(path.stem).layout.nodes > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_every_configuration_of_several_hosts_can_be_converted_on_one(name):
    run = on_one_host(load(name))
    assert not problems(run)
    assert run.layout.nodes == 1 and run.layout.gpus_per_node <= 4
    assert run.paths == load(name).paths and run.model == load(name).model
