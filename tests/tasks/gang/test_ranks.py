"""Commands of a reinforcement learning's members: those that train are one group, those of vLLM's each by itself."""

import subprocess
from itertools import batched
from types import SimpleNamespace

import pytest

from conf.load import load
from tasks.gang import torchrun
from tasks.gang.job import job_of
from tasks.gang.messages import Word
from tasks.gang.ranks import Ranks
from tasks.gang.torchrun import Torchrun

KEYS = {"hardware.gpu": "cpu", "layout.nodes": 2, "layout.gpus_per_node": 2, "train.micro_batch": 2}
KEYS |= {"reinforce.hosts": 2}
GROUP = ("10.0.0.1", 29500)  # where the ranks that train meet


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(place, *overrides) -> the ranks of the member at this place, its command and its environment."""
    seen: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str], **_: object):
            seen.append((command, env))

        def poll(self) -> None:
            return None

    monkeypatch.setattr(torchrun, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL))

    def started(place: int, *overrides: str) -> tuple[Ranks, dict[str, str], dict[str, str]]:
        given = KEYS | dict(one.split("=") for one in overrides) | {"paths.reinforced": tmp_path}
        run = load("tiny-rl", [f"{key}={value}" for key, value in given.items()])
        job = job_of("reinforce", run)
        assert job
        conf, folder = job.conf(job.run), tmp_path / str(place)
        task, word = job.task(job.run), Word("controller", "go", master=GROUP, key="secret")
        made = Ranks("gang-1", folder / "conf.yaml", conf, task, word, place, f"10.0.0.{place + 1}", folder, Torchrun())
        command, environment = seen[-1]
        return made, of_torchrun(command), environment

    return started


def of_torchrun(command: list[str]) -> dict[str, str]:
    """Options of torchrun, and the module that its ranks run."""
    *_, last = (place for place, word in enumerate(command) if word == "-m")
    options = command[command.index("trainer.startup.torchrun") + 1 : last]
    return {name.removeprefix("--"): value for name, value in batched(options, 2)} | {"module": command[last + 1]}


def test_hosts_that_train_are_one_group_which_meets_on_the_first(started):
    for place in (0, 1):
        made, command, environment = started(place)
        assert command["module"] == "trainer.reinforce"
        assert (command["nnodes"], command["rdzv-conf"], command["nproc-per-node"]) == ("2", f"rank={place}", "2")
        assert (command["rdzv-endpoint"], environment["GANG_KEY"]) == ("10.0.0.1:29500", "secret")
        assert (made.first, made.count, made.shift) == (2 * place, 2, 0)
        assert environment["GANG_ADDRESS"] == environment["VLLM_HOST_IP"] == f"10.0.0.{place + 1}"
        assert environment["GANG_ATTEMPT"] == "gang-1"


def test_each_host_of_vllm_is_a_group_of_its_own_whose_ranks_are_numbered_behind_those_that_train(started, tmp_path):
    for place in (2, 3):
        made, command, _ = started(place)
        assert command["module"] == "trainer.reinforcement.engines.guest"
        assert (command["nnodes"], command["rdzv-conf"], command["nproc-per-node"]) == ("1", "rank=0", "1")
        assert (made.first, made.count, made.shift) == (2 * place, 1, 2 * place)
        assert made.writes == tmp_path


def test_without_hosts_of_vllm_s_own_all_members_train(started):
    for place in (0, 1):
        _, command, _ = started(place, "reinforce.hosts=0")
        assert (command["module"], command["nnodes"]) == ("trainer.reinforce", "2")
        assert command["rdzv-endpoint"] == "10.0.0.1:29500"


def test_engines_behind_training_have_gpus_of_their_own_and_no_ranks(started):
    keys = ("hardware.gpu=h100", "train.precision=bf16", "reinforce.hosts=0", "reinforce.engine_gpus=2")
    made, command, _ = started(1, *keys)
    assert command["nproc-per-node"] == "2" and made.count == 2
