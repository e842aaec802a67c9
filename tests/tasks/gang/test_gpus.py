"""Members of a gang and the GPUs of their host: a gang on one host takes them before it starts, others as they join."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conf.host import gpu_locks
from conf.load import load
from contract.faults import Fault
from tasks.gang import member
from tasks.gang.board import Board
from tasks.gang.engines import Demand, local
from tasks.gang.job import Training
from tasks.gang.messages import Word
from tasks.run import guard
from tasks.store import open_store
from tests.conf.host.test_gpu_locks import fake_nvidia_smi, held, show_gpus

TWO_HOSTS = ["layout.nodes=2", "layout.gpus_per_node=1", "train.micro_batch=8"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Of two hosts of one GPU each, on a machine with four."""
    fake_nvidia_smi(tmp_path, monkeypatch.setenv)
    show_gpus(tmp_path, dict.fromkeys(("GPU-a", "GPU-b", "GPU-c", "GPU-d"), 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return load("tiny", [*TWO_HOSTS, f"paths.logs={tmp_path / 'logs'}"])


@pytest.fixture
def board(tmp_path, run):
    made = Board(open_store(str(tmp_path / "store")), "gang-1", 1)
    made.write("task.json", Training(run).task(run).to_json())
    made.write("gang.json", Word("me", "gathering").to_json())
    return made


def test_a_gang_on_this_host_waits_for_the_gpus_that_it_would_use_and_no_others(run, monkeypatch):
    with contextlib.closing(gpu_locks.take("train of a", pytest.fail, gpus=("GPU-d",))):
        assert local.capacity(Demand.of(run)) is None
    with contextlib.closing(gpu_locks.take("evaluate-base of b", pytest.fail, gpus=("GPU-b",))):
        assert local.capacity(Demand.of(run)).startswith("2 GPUs of this host: evaluate-base of b has held 1 of 2 for")


def test_a_gang_on_this_host_has_the_visible_gpus_and_no_others(run, board, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    assert local.available(Demand.of(run)) == 2
    with contextlib.closing(gpu_locks.take("train of a", pytest.fail, gpus=("GPU-a", "GPU-b"))):
        assert local.capacity(Demand.of(run)) is None
    said = [sys.executable, "-c", "import os; print(*map(os.environ.get, ('GANG_HOST', 'CUDA_VISIBLE_DEVICES')))"]
    monkeypatch.setattr(local, "guarded", lambda gang, board, node: guard.guarded(said, 5.0))
    members = local.start(Demand.of(run), board, 2)
    assert [process.wait(10) for process in members.processes] == [0, 0]
    members.cancel()
    logs = [path.read_text().split() for path in sorted(Path(run.paths.logs).glob("member*.log"))]
    assert logs == [[f"{socket.gethostname()}/{number}", str(number)] for number in (2, 3)]


@pytest.mark.parametrize("nodes, each", [(2, 1), (1, 2)])
def test_more_gpus_than_are_visible_are_refused(run, monkeypatch, nodes, each):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    more = Demand.of(run.changed(layout={"nodes": nodes, "gpus_per_node": each}))
    with pytest.raises(Fault, match=f"{nodes} hosts with {each} GPUs each are more than the 1 GPUs of this host"):
        local.capacity(more)


def test_a_gang_on_this_host_comes_after_those_that_wait(run, monkeypatch):
    with contextlib.closing(gpu_locks.take("train of a", pytest.fail, gpus=("GPU-d",))):
        over, said = threading.Event(), threading.Event()
        asks = ("evaluate-base of b", lambda _: said.set(), over.is_set)
        waits = threading.Thread(target=gpu_locks.take, args=asks, daemon=True)
        waits.start()
        assert said.wait(10)
        assert local.capacity(Demand.of(run)) == "2 GPUs of this host: evaluate-base of b waits for 4 GPUs of them"
        over.set()
        waits.join(10)
        assert local.capacity(Demand.of(run)) is None


def test_its_members_have_all_of_them_until_the_last_is_over(run, board, monkeypatch):
    sleeps = guard.guarded([sys.executable, "-c", "import time; time.sleep(30)"], 5.0)
    monkeypatch.setattr(local, "guarded", lambda gang, board, node: sleeps)
    members = local.start(Demand.of(run), board, 2)
    assert held(("GPU-a",)).startswith("gang gang-1 has held it for")
    members.processes[0].stdin.close()
    members.processes[0].wait()
    assert held(("GPU-b",)) and held(("GPU-c",)) is None
    members.cancel()
    assert held(("GPU-a", "GPU-b")) is None


def test_a_gang_that_somebody_was_faster_than_does_not_wait_for_ever(run, board, monkeypatch):
    monkeypatch.setattr(local, "TAKEN_WITHIN", 0.6)
    with (
        contextlib.closing(gpu_locks.take("train of a", pytest.fail, gpus=("GPU-a",))),
        pytest.raises(TimeoutError, match="others have taken the GPUs of this host"),
    ):
        local.start(Demand.of(run), board, 2)


def test_a_member_joins_once_its_gpu_is_free_and_not_where_its_attempt_is_over(run, board, capsys, monkeypatch):
    for name in (gpu_locks.HELD, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # which the member sets for its ranks
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def join() -> bool:
        return member._take_gpus(board, member.Ending([]))

    with contextlib.closing(gpu_locks.take("train of a", pytest.fail)):
        threading.Timer(1.0, lambda: board.write("gang.json", Word("me", "stop").to_json())).start()
        assert not join()
    assert "gang gang-1 waits for 1 GPU: train of a has held them for" in capsys.readouterr().out
    board.write("gang.json", Word("me", "gathering").to_json())
    child = subprocess.Popen(["sleep", "0.1"])  # what the member starts does not keep them
    assert join() and held(("GPU-a",)) and held(("GPU-b",)) is None
    child.wait()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
