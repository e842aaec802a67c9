"""Reinforcement learning on two ranks: the same answers, rewards and gradients as on one, and one end for both."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from contract import checkpoints
from tests.support.reinforced import answers, norms, signals

KEYS = {"reinforce.steps": 3, "reinforce.updates": 2, "train.micro_batch": 2, "checkpoint.save_every": 3}
TWO = {"layout.gpus_per_node": 2}
CUTS = {
    "copies": {},
    "tensor and sequence parallel": {"layout.tp": 2, "layout.sp": True},
    "pipeline parallel": {"layout.pp": 2},
    "expert parallel": {"layout.ep": 2},
    "context parallel": {"layout.cp": 2},
    "tensor and sequence parallel, shared memory": {
        "layout.tp": 2,
        "layout.sp": True,
        "reinforce.transport": "ipc",
    },
    "pipeline parallel, shared memory": {"layout.pp": 2, "reinforce.transport": "ipc"},
    "packed": {"data.packed": True, "train.micro_batch": 1},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Path]:
    return {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cut", CUTS)
def test_two_ranks_are_told_and_learn_what_one_is_and_does(cut, finish, alone):
    if not alone:
        alone["folder"] = finish("alone", KEYS)
    found = finish(cut.replace(",", "").replace(" ", "-"), KEYS | TWO | CUTS[cut])
    expected = alone["folder"]
    assert answers(found) == answers(expected)
    assert norms(found) == pytest.approx(norms(expected), rel=1e-4)
    assert signals(found) == pytest.approx(signals(expected), rel=1e-3, abs=1e-3)
    assert any(len(set(rewards)) > 1 for _, rewards in answers(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_rank_0_finds_wrong_ends_all_with_one_line(start, place):
    process, _ = start("apart", KEYS | TWO | {"layout.pp": 2, "reinforce.probe_bound": 1e-15})
    assert process.wait(500) == 2
    (line,) = [one for one in (place / "apart.log").read_text().splitlines() if one.startswith("error: ")]
    assert "probe: vLLM and Megatron differ" in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_dies_ends_all_and_sigterm_saves(start, finish, place):
    keys = KEYS | TWO | {"reinforce.steps": 200, "checkpoint.save_every": 200}
    process, folder = start("ended", keys)
    _wait(folder / "rollouts" / "000002.json", process)
    ranks = [one for one in psutil.Process(process.pid).children(recursive=True) if _is_rank(one, "1")]
    (vllm,) = [one for one in psutil.Process(process.pid).children(recursive=True) if "vllm_process" in _said(one)]
    assert len(ranks) == 1
    ranks[0].kill()
    began = time.monotonic()
    assert process.wait(120) != 0
    assert time.monotonic() - began < 90 and not vllm.is_running()

    process, _ = start("ended", keys)
    _wait(folder / "rollouts" / "000004.json", process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(180) == 0, (place / "ended.log").read_text()[-3000:]
    assert checkpoints.complete_steps(folder / "checkpoints")


def _wait(path: Path, process) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)


def _is_rank(one: psutil.Process, rank: str) -> bool:
    return "trainer.reinforce" in _said(one) and one.environ().get("RANK") == rank


def _said(one: psutil.Process) -> str:
    return " ".join(one.cmdline())
