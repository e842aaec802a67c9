"""Reinforcement learning whose answers other hosts give: the answers of one host, and the loss of one costs nothing."""

import json
import os
import re
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest

from tasks.store import open_store
from tests.support.reinforced import answers, norms
from tests.tasks.gang import driver
from tests.tasks.gang import world as worlds
from tests.tasks.gang.conftest import ROOT, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

KEYS = {
    "hardware.gpu": "cpu",
    "layout.nodes": 1,
    "adapter.kind": "none",
    "reinforce.steps": 6,
    "reinforce.start": "base",
    "reinforce.prompts": 6,
    "reinforce.samples": 4,
    "reinforce.max_tokens": 8,
    "reinforce.lr": 1e-3,
    "reinforce.reward": "regex",
    "reinforce.pattern": "e",
    "reinforce.held_out": 0,
    "checkpoint.save_every": 6,
}


def keys(**own: object) -> list[str]:
    given = KEYS | {key.replace("__", "."): value for key, value in own.items()}
    return [f"{key}={value}" for key, value in given.items()]


def engines(under: psutil.Process) -> list[psutil.Process]:
    return [one for one in under.children(recursive=True) if "vllm_process" in " ".join(one.cmdline())]


def test_hosts_give_the_answers_of_one_and_go_on_without_an_engine_that_is_killed(work):
    """Hosts are process groups of this one. Nothing of them is left."""
    one = work / "one-host"
    paths = {"paths__data": work / "one/data", "paths__reinforced": one, "paths__logs": work / "one-host-logs"}
    command = [sys.executable, "-m", "trainer.reinforce", str(work / "conf.yaml")]
    alone = subprocess.run([*command, *keys(**paths)], cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stdout + alone.stderr

    folder, log = work / "several-hosts", work / "several-hosts.txt"
    folder.mkdir()
    command = [sys.executable, driver.__file__, "reinforce", str(work / "conf.yaml"), str(folder), str(work / "store")]
    command += keys(paths__data=work / "one/data", reinforce__hosts=2)
    with log.open("w") as output:
        running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_for(lambda: (folder / "files/rollouts/000002.json").exists() or running.poll() is not None, 1200)
        assert running.poll() is None, log.read_text()
        found = engines(psutil.Process(running.pid))
        assert len(found) == 2
        found[0].kill()
        assert running.wait(900) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
    told = log.read_text()
    assert re.search(r"/\d has ended; the others continue without it", told) and "attempt 2" not in told
    assert answers(folder / "files") == answers(one)
    assert norms(folder / "files") == pytest.approx(norms(one), rel=1e-4)
    wait_for(lambda: not any(process.is_running() for process in found), 30)


@pytest.mark.parametrize("cut", [{}, {"layout__pp": 2}], ids=["dp2", "pp2"])
def test_two_hosts_train_as_one_with_two_processes_and_one_that_is_lost_costs_no_answers(work, cut):
    """The second of the hosts that train is killed behind a checkpoint. A third host answers."""
    name = "pp2" if cut else "dp2"
    one, folder, log = work / f"one-{name}", work / f"two-{name}", work / f"two-{name}.txt"
    paths = {"paths__data": work / "one/data", "paths__reinforced": one, "paths__logs": work / f"one-{name}-logs"}
    command = [sys.executable, "-m", "trainer.reinforce", str(work / "conf.yaml")]
    given = cut | {"reinforce__updates": 2, "checkpoint__save_every": 2}
    alone = subprocess.run(
        [*command, *keys(**paths, **given, layout__gpus_per_node=2)], cwd=ROOT, capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr

    folder.mkdir()
    command = [sys.executable, driver.__file__, "reinforce", str(work / "conf.yaml"), str(folder), str(work / "store")]
    command += keys(paths__data=work / "one/data", layout__nodes=2, reinforce__hosts=1, **given)
    with log.open("w") as output:
        running = subprocess.Popen([*command, "gang.start_within=300"], cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_for(lambda: (folder / "files/rollouts/000004.json").exists() or running.poll() is not None, 1200)
        assert running.poll() is None, log.read_text()
        (names,) = re.findall(r"attempt 1: (.*) reinforce;", log.read_text())
        second = names.split(", ")[1]
        asked = (folder / "files/rollouts/000003.json").stat().st_mtime_ns
        member(psutil.Process(running.pid), int(second.rpartition("/")[2])).kill()
        assert running.wait(900) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
    told = log.read_text()
    assert f"host: {second} no longer answers; continues" in told and "attempt 2: " in told and "attempt 3" not in told
    assert "step 3: trained on the answers in" in told
    assert (folder / "files/rollouts/000003.json").stat().st_mtime_ns == asked
    assert answers(folder / "files") == answers(one) and len(answers(one)) == 6
    assert norms(folder / "files") == pytest.approx(norms(one), rel=1e-5)
    lines = [json.loads(line) for line in (folder / "files/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [*range(1, 13)]


@pytest.mark.parametrize(
    "cut",
    [{"layout__tp": 2, "layout__sp": "true", "reinforce__transport": "files"}, {"layout__ep": 2}, {"layout__cp": 2}],
    ids=["tp2 by files", "ep2", "cp2"],
)
def test_two_hosts_train_as_one_with_vllm_on_the_first_of_them(work, request, cut):
    name = re.sub(r"\W+", "-", request.node.callspec.id)
    one, folder, log = work / f"both-{name}", work / f"first-{name}", work / f"first-{name}.txt"
    paths = {"paths__data": work / "one/data", "paths__reinforced": one, "paths__logs": work / f"both-{name}-logs"}
    given = cut | {"reinforce__steps": 3, "checkpoint__save_every": 3}
    command = [sys.executable, "-m", "trainer.reinforce", str(work / "conf.yaml")]
    command += keys(**paths, **given, layout__gpus_per_node=2)
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stdout + alone.stderr

    folder.mkdir()
    command = [sys.executable, driver.__file__, "reinforce", str(work / "conf.yaml"), str(folder), str(work / "store")]
    command += keys(paths__data=work / "one/data", layout__nodes=2, gang__start_within=300, **given)
    with log.open("w") as output:
        assert subprocess.run(command, cwd=ROOT, stdout=output, stderr=output).returncode == 0, log.read_text()
    assert re.search(r"attempt 1: \S+/0, \S+/1 reinforce;", log.read_text()) and "attempt 2" not in log.read_text()
    assert answers(folder / "files") == answers(one) and len(answers(one)) == 3
    assert norms(folder / "files") == pytest.approx(norms(one), rel=1e-5)
    assert [*(folder / "logs").glob("rollout*.log")] == [folder / "logs/rollout.log"]


def member(under: psutil.Process, number: int) -> psutil.Process:
    """The member of this number that runs below a controller."""
    found = [one for one in under.children(recursive=True) if "tasks.gang.member" in one.cmdline()]
    (one,) = [
        one for one in found if one.cmdline()[-2:] == ["--node", str(number)] and "tasks.run.guard" not in one.cmdline()
    ]
    return one


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := worlds.missing():
        pytest.skip(why)
    with worlds.world(tmp_path_factory.mktemp("hosts"), 4) as made:
        yield made


def of_store(made: worlds.World) -> list[list]:
    """Tokens and rewards of each step, of the artifact in the store."""
    with mock.patch.dict(os.environ, made.environment):
        store = open_store(os.environ["FINETUNE_STORE"])
        names = sorted(key for key in store.keys("reinforce") if re.search(r"/files/rollouts/0\d+\.json$", key))
        steps = [json.loads(found[0]) for name in names if (found := store.read(f"reinforce/{name}"))]
    return [[(one["tokens"], one["reward"]) for group in step["groups"] for one in group["answers"]] for step in steps]


def test_one_of_three_hosts_that_is_lost_is_noticed_and_its_prompts_are_asked_of_the_others(hosts):
    """Hosts are network namespaces with a Prefect worker each; the lost one's power is off."""
    log, asked = (
        hosts.folder / "flow.log",
        ("--until", "reinforce", *keys(reinforce__steps=20, checkpoint__save_every=20)),
    )
    assert hosts.flow(*asked, "gang.engine=local").wait(900) == 0, log.read_text()
    expected = of_store(hosts)
    assert len(expected) == 20
    log.unlink()
    flow = hosts.flow("--from", "reinforce", *asked, "reinforce.hosts=3")
    journal = hosts.folder / "runs/work"
    try:
        wait_for(lambda: [*journal.glob("reinforce-*/files/rollouts/000003.json")] or flow.poll() is not None, 900)
        assert flow.poll() is None, log.read_text()
        (names,) = re.findall(r"attempt 1: (.*) reinforce;", log.read_text())
        lost = names.split(", ")[2]
        hosts.kill_host(int(lost.removeprefix("host")))
        began = time.monotonic()
        wait_for(lambda: f"{lost} no longer answers; the others continue without it" in log.read_text(), 60)
        print(f"the flow noticed {time.monotonic() - began:.1f} s after the host was lost")
        assert time.monotonic() - began < 16
        assert flow.wait(900) == 0, log.read_text()
    finally:
        flow.kill()
        flow.wait()
    assert "attempt 2" not in log.read_text()
    assert of_store(hosts) == expected
