"""trainer/startup/forks.py: ranks as forks of their command meet, end with it, and with the first that fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.startup import forks

ROOT = Path(__file__).parents[3]

TOY = """
import os, pathlib, sys, time, types
from contract.faults import Fault
from trainer.startup import entry, forks

def work():
    with entry.faults_in_one_line():
        rank = int(os.environ["RANK"])
        os.write(1, f"rank {{os.getpid()}}\\n".encode())  # at once, or lines of two ranks are mixed
        if {case!r} == "meet":
            import torch
            torch.distributed.init_process_group("gloo")
            total = torch.tensor([rank + 1])
            torch.distributed.all_reduce(total)
            os.write(1, f"sum {{int(total)}} {{os.environ['WORLD_SIZE']}}\\n".encode())
            return
        if rank == 1:
            time.sleep(0.5)  # until the other is there, too
        if rank == 1 and {case!r} == "defect":
            raise ZeroDivisionError("planted")
        if rank == 1 and {case!r} == "fault":
            raise Fault("planted: line")
        time.sleep(60)

if __name__ == "__main__":
    if {case!r} != "meet":
        forks._meeting_place = lambda: types.SimpleNamespace(port=0)  # and no torch, which takes seconds
    forks.share(2)
    fault = pathlib.Path(os.environ[entry.FAULT_FILE])
    sys.exit(entry._code(forks.run(work, 2, sys.stderr.writelines), fault))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Starts the toy with a case, and ends it with the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TRAINER_FAULT_FILE", str(tmp_path / "fault"))
    processes = []

    def start(case: str) -> tuple[subprocess.Popen, list[int]]:
        (tmp_path / "toy.py").write_text(TOY.format(case=case))
        processes.append(
            subprocess.Popen(
                [sys.executable, tmp_path / "toy.py"],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        )
        ranks = []
        while len(ranks) < 2:
            line = processes[-1].stdout.readline()
            assert line
            ranks += [int(line.split()[1])] if line.startswith("rank ") else []
        return processes[-1], ranks

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def gone(pids: list[int], within: float = 5) -> bool:
    until = time.monotonic() + within
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Ending:
    """A rank that is found to have failed a moment after it was found to run."""

    sentinel = 0

    def __init__(self):
        self.codes = iter([None])

    def join(self, seconds: float | None = None) -> None:
        pass

    def terminate(self) -> None:
        pass

    @property
    def exitcode(self) -> int | None:
        return next(self.codes, -signal.SIGTERM)


def test_ranks_that_end_while_they_are_looked_at_have_failed_all_the_same(monkeypatch):
    monkeypatch.setattr(forks, "wait", lambda sentinels, timeout: sentinels)
    assert forks._watch([Ending(), Ending()]) == -signal.SIGTERM


def test_ranks_meet_and_know_their_numbers(toy):
    command, _ = toy("meet")
    assert command.stdout.read() == "sum 3 2\n" * 2
    assert command.wait(30) == 0


@pytest.mark.parametrize(
    "case, code, said", [("defect", 1, "ZeroDivisionError: planted\n"), ("fault", 2, "error: planted: line\n")]
)
def test_the_first_rank_that_fails_ends_the_others(toy, case, code, said):
    command, ranks = toy(case)
    assert command.stdout.read().endswith(said) and command.wait(30) == code
    assert gone(ranks)


@pytest.mark.parametrize(
    "victim, how, code, said",
    [
        ("command", signal.SIGKILL, -signal.SIGKILL, ""),
        ("command", signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (
            "rank",
            signal.SIGKILL,
            128 + signal.SIGKILL,
            "rank 1 was killed, probably by the kernel because memory ran out\n",
        ),
    ],
)
def test_whatever_is_killed_no_rank_is_left(toy, victim, how, code, said):
    command, ranks = toy("wait")
    os.kill(command.pid if victim == "command" else ranks[1], how)
    assert command.wait(30) == code and gone(ranks)
    if victim == "rank":  # either of the two may have said its number first
        assert command.stdout.read().replace("rank 0", "rank 1") == said
