"""Gangs on hosts of their own addresses, each with a Prefect worker: what a flow that asks for some of them sees."""

import json
import os
import re
from unittest import mock

import psutil
import pytest

from tasks.store import open_store
from tests.support.flow_world import wait_for
from tests.tasks.gang import world as worlds
from tests.tasks.gang.conftest import same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


INSIDE = ("layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "layout.ep=2")  # of each host


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := worlds.missing():
        pytest.skip(why)
    with worlds.world(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def alone(hosts) -> dict[int, float]:
    """Losses of one process."""
    own = {"FINETUNE_STORE": str(hosts.folder / "one"), "FINETUNE_RUNS": str(hosts.folder / "runs-one")}
    assert hosts.flow("--until", "train", "gang.engine=local", **own).wait(200) == 0
    return losses(hosts, **own)


def losses(made: worlds.World, **environment: str) -> dict[int, float]:
    """Of the training artifact in the store."""
    with mock.patch.dict(os.environ, made.environment | environment):
        store = open_store(os.environ["FINETUNE_STORE"])
        (name,) = (key for key in store.keys("train") if key.endswith("/files/metrics.jsonl"))
        found = store.read(f"train/{name}")
    assert found
    lines = [json.loads(line) for line in found[0].splitlines()]
    return {line["step"]: line["lm_loss"] for line in lines if line["kind"] == "train"}


@pytest.mark.parametrize("count, across", [(3, "dp 3, ep 2"), (4, "pp 2, vpp None, cp 1, dp 2, ep 2")])
def test_tensor_and_expert_parallel_inside_and_the_rest_across_hosts(hosts, alone, count, across):
    """Where there is one worker less than hosts that are asked for, none is held until it comes."""
    log = hosts.folder / "flow.log"
    log.unlink(missing_ok=True)
    for host in {*range(count - 1)} - {*hosts.workers}:
        hosts.join(host)
    shape = (*INSIDE, f"layout.nodes={count}", f"layout.pp={2 if 'pp 2' in across else 1}")
    flow = hosts.flow("--from", "train", "--until", "train", *shape)
    if count - 1 not in hosts.workers:
        waits = f"waits for hosts: {count} of pool finetune-nodes, where {count - 1} workers are free"
        wait_for(lambda: waits in log.read_text(), 90)
        assert hosts.training() == []
        hosts.join(count - 1)
    assert flow.wait(400) == 0, log.read_text()
    assert re.search(rf"attempt \d+: (host\d(, )?){{{count}}} train", log.read_text())
    assert "tp 2, sp True" in log.read_text() and across in log.read_text()
    assert same(losses(hosts), alone)
    wait_for(lambda: hosts.training() == [], 10)


def test_a_host_that_is_left_out_hands_back_what_it_gets(hosts):
    """Its worker goes on, and is the first to take the run that another one waits for."""
    for host in {*range(3)} - {*hosts.workers}:
        hosts.join(host)
    log = hosts.folder / "flow.log"
    log.unlink(missing_ok=True)
    # All hosts share one disk, which has other things to do: pre-flight would find one of them slow.
    wide = (f"layout.nodes={len(hosts.workers) - 1}", "gang.preflight=false")
    flow = hosts.flow("--until", "train", *wide, "train.seed=7")
    wait_for(lambda: hosts.step() > 12 and "attempt 1:" in log.read_text(), 240)
    busy = [host for host in hosts.workers if hosts.members(host)]
    (idle,) = hosts.workers.keys() - {*busy}
    out = busy[0]
    worker = hosts.folder / f"worker{out}.log"
    hosts.members(out)[0].kill()
    wait_for(lambda: f"continues without host{out}" in log.read_text(), 60)
    slow = psutil.Process(hosts.workers[idle].pid)
    slow.suspend()
    try:
        wait_for(lambda: "-2-" in worker.read_text(), 60)
    finally:
        slow.resume()
    assert flow.wait(150) == 0, log.read_text()
    (second,) = re.findall(r"attempt 2: (.*) train;", log.read_text())
    assert {*second.split(", ")} == {f"host{host}" for host in hosts.workers} - {f"host{out}"}
    assert "attempt 3" not in log.read_text()
    wait_for(lambda: hosts.training() == [], 10)
