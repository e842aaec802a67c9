"""Models that hosts of their own addresses serve together: the same answers as of one process, also after a loss."""

import json
import os
import re
from unittest import mock

import psutil
import pytest

from tasks.store import open_store
from tests.support.flow_world import wait_for
from tests.tasks.gang import world as worlds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ASKED = ("--until", "evaluate-base", "gang.engine=local", "evaluate.rows=20", "evaluate.max_tokens=8")
TOGETHER = (*ASKED, "evaluate.nodes=2", "evaluate.engine=prefect")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := worlds.missing():
        pytest.skip(why)
    with worlds.world(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture(scope="module")
def alone(hosts) -> dict:
    """What one process answers."""
    own = {"FINETUNE_STORE": str(hosts.folder / "one"), "FINETUNE_RUNS": str(hosts.folder / "runs-one")}
    assert hosts.flow(*ASKED, **own).wait(400) == 0, (hosts.folder / "flow.log").read_text()
    return results(hosts, **own)


def results(made: worlds.World, **environment: str) -> dict:
    """Results of the one evaluation in the store."""
    with mock.patch.dict(os.environ, made.environment | environment):
        store = open_store(os.environ["FINETUNE_STORE"])
        (name,) = (key for key in store.keys("evaluate") if key.endswith("/files/results.json"))
        found = store.read(f"evaluate/{name}")
    assert found
    return json.loads(found[0])


def same(one: dict, other: dict) -> bool:
    """Whether all answers are equal, and likelihoods but for the order of sums."""
    likely = [found["metrics"]["held_out/log_likelihood"] for found in (one, other)]
    return one["samples"] == other["samples"] and likely[0] == pytest.approx(likely[1], abs=1e-5)


def serving(made: worlds.World, host: int) -> list[psutil.Process]:
    """Processes of a host that serve, vLLM's workers among them."""
    (top, *_) = [p for p in made.processes(host) if "trainer.evaluate" in " ".join(p.cmdline())] or [None]
    return [top, *top.children(recursive=True)] if top else []


def test_two_hosts_answer_as_one_process_does(hosts, alone):
    log = hosts.folder / "flow.log"
    log.unlink()
    assert hosts.flow(*TOGETHER).wait(600) == 0, log.read_text()
    assert re.search(r"attempt 1: (host\d), (host\d) evaluate; logs in", log.read_text())
    assert "attempt 2" not in log.read_text()
    assert same(results(hosts), alone)
    wait_for(lambda: not any(serving(hosts, host) for host in hosts.workers), 30)


def test_a_worker_that_is_killed_on_a_host_that_only_computes_costs_an_attempt(hosts, alone):
    log = hosts.folder / "flow.log"
    log.unlink()
    flow = hosts.flow("--from", "evaluate-base", *TOGETHER)
    wait_for(lambda: "starting vLLM" in log.read_text(), 300)
    (hosts_of_first,) = re.findall(r"attempt \d+: (.*) evaluate;", log.read_text())
    second = int(hosts_of_first.split(", ")[1].removeprefix("host"))
    wait_for(lambda: len(serving(hosts, second)) > 3, 200)  # torchrun, the rank, and vLLM's worker
    serving(hosts, second)[-1].kill()
    assert flow.wait(600) == 0, log.read_text()
    assert len(re.findall(r"attempt \d+: .* evaluate;", log.read_text())) == 2
    assert same(results(hosts), alone)
    wait_for(lambda: not any(serving(hosts, host) for host in hosts.workers), 30)


def test_a_host_that_is_gone_is_replaced(hosts, alone):
    log = hosts.folder / "flow.log"
    log.unlink()
    flow = hosts.flow("--from", "evaluate-base", *TOGETHER)
    wait_for(lambda: "starting vLLM" in log.read_text(), 300)
    (hosts_of_first,) = re.findall(r"attempt \d+: (.*) evaluate;", log.read_text())
    gone = hosts_of_first.split(", ")[1]
    hosts.kill_host(int(gone.removeprefix("host")))
    assert flow.wait(600) == 0, log.read_text()
    assert f"host: {gone} no longer answers" in log.read_text()
    assert gone not in re.findall(r"attempt \d+: (.*) evaluate;", log.read_text())[-1]
    assert same(results(hosts), alone)
