"""Runs in terminals: one Prefect server for all, and nothing of it is left, however they end."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flow_world import ROOT, wait_for

BEGUN = "Beginning flow run"


@pytest.fixture
def flow(tmp_path, monkeypatch):
    """flow(name): start a short run, and return its process and its output."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("PREFECT_HOME")

    def flow(name: str) -> tuple[subprocess.Popen, Path]:
        output = tmp_path / name
        command = [sys.executable, "-m", "flows.finetune", "tiny", "--until", "download"]
        with output.open("w") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True), output

    yield flow
    for pid in left(tmp_path):
        os.kill(pid, signal.SIGKILL)


def left(folder: Path) -> list[int]:
    """Processes that know this folder of runs."""
    found, mark = [], f"FINETUNE_RUNS={folder}/runs".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.timeout(600)
def test_two_runs_share_a_server_that_ends_after_the_last_of_them(flow, tmp_path):
    """SIGKILL of the run that has started the server; then SIGTERM of the other's process group, as timeout sends."""
    runs = [flow("first"), flow("second")]
    for process, output in runs:
        wait_for(lambda run=(process, output): run[0].poll() is not None or BEGUN in run[1].read_text(), 240)
        assert process.poll() is None, output.read_text()
    runs.sort(key=lambda run: "server: starts" not in run[1].read_text())
    (starter, _), (other, output) = runs
    starter.kill()
    starter.wait()
    os.killpg(other.pid, signal.SIGTERM)
    other.wait(60)
    wait_for(lambda: not left(tmp_path), 30)
    with sqlite3.connect(tmp_path / "runs/prefect/prefect.db") as database:
        states = sorted(state for (state,) in database.execute("select state_type from flow_run"))
    assert states in (["CANCELLED", "RUNNING"], ["CRASHED", "RUNNING"]), output.read_text()  # nobody reports a SIGKILL
    assert not (tmp_path / "home/.prefect/prefect.db").exists()
