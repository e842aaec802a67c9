"""A gang of 200 hosts on this one: its controller takes little, and notices the one that dies
(benchmarks/gang_scale.py)."""

import subprocess
import sys

import pytest

from tests.tasks.gang.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200_hosts():
    line = [sys.executable, "-m", "benchmarks.gang_scale", "200", "--minutes", "0.2"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
