"""Two to four gangs that reach for the same hosts: every one of them trains in the end
(tests/tasks/gang/compete.py)."""

import subprocess
import sys

import pytest

from tests.tasks.gang.conftest import ROOT


def compete(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "tests.tasks.gang.compete", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("trials", ["10", pytest.param("100", marks=pytest.mark.slow)])
def test_all_gangs_get_hosts_whoever_dies_on_the_way(trials):
    done = compete(trials)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong;" in done.stdout and " 0 hosts" not in done.stdout and " 0 controllers" not in done.stdout


@pytest.mark.slow
def test_without_turns_it_would_be_noticed():
    done = compete("10", "--no-turn")
    assert done.returncode == 1 and "gathers while another does" in done.stdout
