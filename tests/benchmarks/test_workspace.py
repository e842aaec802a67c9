"""benchmarks/workspace.py: what a benchmark started ends with it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.flow_world import ROOT, wait_for

BENCHMARK = """
import subprocess, sys, time
from benchmarks.workspace import workspace
with workspace("test", sys.argv[1]) as folder:
    (folder / "file").touch()
    server = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print(folder, server.pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [None, signal.SIGKILL], ids=str)
def test_neither_a_server_nor_a_file_is_left(tmp_path, number):
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path), "300" if number else "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        folder, pid = running.stdout.readline().split()
        if number:
            running.send_signal(number)
    assert wait_for(lambda: not Path(folder).exists(), 20)
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
