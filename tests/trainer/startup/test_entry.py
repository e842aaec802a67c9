"""trainer/startup/entry.py: ranks end with the torchrun that started them. Toy ranks: no Megatron, no process group."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf import network
from conf.host import nvidia_smi
from conf.load import load
from trainer.startup import entry

ROOT = Path(__file__).parents[3]

# One rank: says who it is and waits. SIGTERM is for saving, so it does not end it.
RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from trainer.startup import entry
entry._die_with_agent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
# What torchrun is to a rank, as far as this goes: the parent that names itself in the environment.
AGENT = """
import os, subprocess, sys, time
for rank in range(2):
    subprocess.Popen([sys.executable, "rank.py"], start_new_session=True, env=os.environ | {"TORCHELASTIC_RUN_ID": "1"})
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within: float = 3) -> bool:
    until = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts python code beside a rank.py; what it starts is ended with the test."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.chdir(tmp_path)
    processes = []

    def start(*command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def test_ranks_end_when_their_agent_is_killed(started):
    agent = started("-c", AGENT)
    ranks = [int(agent.stdout.readline()) for _ in range(2)]
    assert all(map(alive, ranks))
    agent.kill()
    assert gone(ranks)


def test_an_agent_that_was_gone_first_leaves_no_rank(started, tmp_path):
    """The rank starts as an orphan of the guard's: its agent died before it could ask to die with it."""
    (tmp_path / "late.py").write_text(f"import time\ntime.sleep(0.3)\n{RANK}")
    (tmp_path / "agent.py").write_text(AGENT.replace("rank.py", "late.py").replace("time.sleep(60)", ""))
    guard = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.environ["GUARD_PID"] = str(os.getpid())
subprocess.run([sys.executable, "agent.py"])
print(*[os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)])
"""
    assert started("-c", guard).stdout.read() == "1 1\n"  # they did no work


def test_a_process_that_no_torchrun_started_outlives_its_parent(started, monkeypatch):
    """As under nohup: a parent's death says nothing."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    parent = started("-c", "import subprocess, sys; subprocess.Popen([sys.executable, 'rank.py'])")
    rank = int(parent.stdout.readline())
    parent.wait(5)
    try:
        time.sleep(0.2)
        assert alive(rank)
    finally:
        os.kill(rank, signal.SIGKILL)


# The whole chain with the real torchrun: python -m toy -> torchrun -> two ranks.
TOY = """
import os, signal, sys, time
from conf.load import load
from trainer.startup import entry

def leave(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit()

if "RANK" in os.environ:
    entry._die_with_agent()
    signal.signal(signal.SIGTERM, leave)
    print("rank", os.getpid(), os.getppid(), flush=True)
    time.sleep(60)
else:
    entry._torchrun(load("tiny", ["layout.gpus_per_node=2", "train.micro_batch=8"]), "toy")
"""


@pytest.fixture
def chain(started, tmp_path):
    """The command, and the process ids of torchrun and of its ranks."""
    (tmp_path / "toy.py").write_text(TOY)
    command, ranks = started("-m", "toy"), []
    while len(ranks) < 2:
        words = command.stdout.readline().split()
        assert words
        ranks += [words[1:]] if words[0] == "rank" else []
    return command, int(ranks[0][1]), [int(pid) for pid, _ in ranks]


@pytest.mark.parametrize("victim", ["command", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_no_rank_outlives_torchrun_or_who_started_it(chain, victim):
    command, torchrun, ranks = chain
    assert all(map(alive, [command.pid, torchrun, *ranks]))
    os.kill(command.pid if victim == "command" else torchrun, signal.SIGKILL)
    assert gone([torchrun, *ranks])


def test_a_notice_of_preemption_reaches_the_ranks(chain):
    """They have the time to save, and the command's end waits for theirs."""
    command, torchrun, ranks = chain
    command.terminate()
    assert command.stdout.read().count("saved") == 2
    assert not any(map(alive, [torchrun, *ranks]))


def test_ranks_start_in_the_environment_of_their_layout_and_what_is_set_here_wins(monkeypatch):
    run = load("tiny", ["layout.gpus_per_node=2", "layout.tp=2", "train.micro_batch=8"])
    assert entry._environment(run) == network.sockets()  # without a GPU
    monkeypatch.setattr(nvidia_smi, "kind", lambda: "NVIDIA H200")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch's compiler sets it for this process
    found = entry._environment(run)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "NCCL_DEBUG" not in found
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{run.paths.kernels}/inductor"
