"""Engines on hosts of their own: who comes to the trainer, who is not listened to, and what a loss costs."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from conf.load import load
from contract.faults import Fault
from tests.tasks.gang import world
from trainer.reinforcement.engines import meeting
from trainer.reinforcement.engines.engine import Group
from trainer.reinforcement.engines.meeting import Meeting
from trainer.reinforcement.rollouts import Rollouts

PROMPTS = [[number] for number in range(10, 20)]
SEEDS = list(range(10))
NET = "10.214.0"


class Far(Rollouts):
    """The trainer's side, without a model."""

    def __init__(self, run: Any):
        Group.__init__(self, run.reinforce.hosts, far=True)
        self.run = run
        self.meeting = Meeting(run)


@pytest.fixture
def started():
    """Processes of the hosts."""
    started: list[subprocess.Popen] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def hosts(tmp_path, monkeypatch, started):
    """hosts(settings of each, address, prefix) -> the trainer's side; each host has a process."""
    opened: list[Far] = []

    def hosts(*settings: dict, address: str = "127.0.0.1", prefixes: tuple[list[str], ...] = ()) -> Far:
        monkeypatch.setenv("GANG_ATTEMPT", "learns-1")
        monkeypatch.setenv("GANG_ADDRESS", address)
        run = load("tiny-rl", [f"reinforce.hosts={len(settings)}", f"paths.logs={tmp_path}"])
        opened.append(Far(run))
        for number, given in enumerate(settings):
            file = tmp_path / f"{number}.json"
            file.write_text(json.dumps(given))
            command = [sys.executable, "-m", "tests.support.stand_in_guest", str(tmp_path), str(file)]
            own = {"GANG_HOST": f"host{number}", "LOCAL_RANK": "0"}
            prefix = prefixes[number] if prefixes else []
            started.append(subprocess.Popen([*prefix, *command], env=os.environ | own))
        return opened[-1]

    yield hosts
    for one in opened:
        one.close()


def asked(engines: Far) -> list[list[int]]:
    """Seeds that came back for the prompts, in order."""
    found = engines.answer(PROMPTS, SEEDS, max_tokens=4)
    assert [prompt for prompt, *_ in found] == PROMPTS
    return [tokens for _, ((tokens, *_),), _ in found]


def test_engines_of_other_hosts_share_prompts_and_one_that_ends_is_left_out(hosts, started, capfd):
    two = hosts({}, {})
    assert stat.S_IMODE(two.meeting.file.stat().st_mode) == 0o600
    two.ready()
    assert [one.name for one in two.engines] == ["engine 0 on host0", "engine 0 on host1"]
    assert not two.meeting.file.exists() and asked(two) == [[seed] for seed in SEEDS]
    lost = two.engines[1]
    started[1].kill()
    lost.wait()
    assert asked(two) == [[seed] for seed in SEEDS] and len(two.engines) == 1
    assert "engine 0 on host1 is removed, and 1 of 2 engines continue" in capfd.readouterr().out
    last = two.engines[0]
    started[0].kill()
    last.wait()
    with pytest.raises(RuntimeError, match=r"vLLM on host0 has ended, .*; no host of vLLM's is left"):
        asked(two)  # no fault of the run's: the next attempt has other hosts


def test_who_does_not_know_the_key_is_not_listened_to(hosts, monkeypatch):
    monkeypatch.setattr(meeting, "ANSWERED", 1)
    one = hosts({})
    place = (one.meeting.place.address, one.meeting.place.port)
    with socket.create_connection(place) as silent, socket.create_connection(place) as liar:
        liar.sendall(bytes(64))
        one.ready()
        assert silent and asked(one) == [[seed] for seed in SEEDS]


def test_engines_that_do_not_come_are_told_of(hosts, monkeypatch):
    monkeypatch.setattr(meeting, "WITHIN", 0.0)
    two = hosts({}, {})
    with pytest.raises(RuntimeError, match=r"^rollout: 0 of 2 engines connected within 0 s$"):
        two.ready()


def test_a_trainer_that_no_gang_has_started_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("GANG_ATTEMPT", raising=False)
    with pytest.raises(Fault, match=r"^reinforce.hosts: 2, but only a gang has other hosts: python -m flows.finetune"):
        Meeting(load("tiny-rl", ["reinforce.hosts=2", f"paths.logs={tmp_path}"]))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(bool(world.missing()), reason=world.missing())
def test_a_host_that_is_cut_off_is_noticed_within_15_seconds_and_its_prompts_are_asked_of_the_others(hosts, started):
    """Hosts are network namespaces. The one that is cut off would answer after a minute, and nobody says it is away."""
    names = [f"reinforced{number}" for number in range(3)]
    try:
        world.ip("link", "add", "rlbr", "type", "bridge")
        world.ip("addr", "add", f"{NET}.1/24", "dev", "rlbr")
        world.ip("link", "set", "rlbr", "up")
        for number, name in enumerate(names):
            world.ip("netns", "add", name)
            world.ip("link", "add", f"rl{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            world.ip("link", "set", f"rl{number}", "master", "rlbr", "up")
            world.ip("-n", name, "addr", "add", f"{NET}.{number + 10}/24", "dev", "eth0")
            world.ip("-n", name, "link", "set", "eth0", "up")
            world.ip("-n", name, "link", "set", "lo", "up")
        prefixes = tuple(["ip", "netns", "exec", name] for name in names)
        three = hosts({}, {"seconds": 60}, {}, address=f"{NET}.1", prefixes=prefixes)
        three.ready()
        cut: list[float] = []

        def off() -> None:
            world.ip("link", "set", "rl1", "down")
            cut.append(time.monotonic())

        threading.Timer(1, off).start()
        assert asked(three) == [[seed] for seed in SEEDS]
        print(f"noticed, and asked of the others, {time.monotonic() - cut[0]:.1f} s after the host was cut off")
        assert time.monotonic() - cut[0] < 15
        assert [one.host for one in three.engines] == ["host0", "host2"]
    finally:
        for one in started:
            one.kill()
            one.wait()
        for number, name in enumerate(names):
            world.ip("netns", "del", name, check=False)
            world.ip("link", "del", f"rl{number}", check=False)
        world.ip("link", "del", "rlbr", check=False)
