"""A torchrun that was started ahead: its ranks are forks of it, they end with it, and it ends if nobody needs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from conf import network
from trainer.patches import forked_ranks

ROOT = Path(__file__).parents[3]
RANK = """
import os, sys, time
print("known", "rare" in sys.modules, "parent", os.getppid(), "mine", os.environ["MINE"], flush=True)
print("counts by NVML", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), flush=True)
print("leader", os.getsid(0) == os.getpid(), "argument", sys.argv[1], flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


USES_CUDA = """
from trainer.patches import forked_ranks
forked_ranks.has_initialised_cuda = lambda: True
"""


@pytest.fixture
def ahead(tmp_path, request):
    """The process that has imported a module which ranks do not import, and one that does not exist."""
    (tmp_path / "toy.py").write_text(RANK)
    (tmp_path / "rare.py").touch()
    (tmp_path / "uses_cuda.py").write_text(USES_CUDA)
    (tmp_path / "modules.json").write_text(json.dumps(["rare", getattr(request, "param", "no_such_module")]))
    command = [sys.executable, "-m", "trainer.startup.torchrun_ahead", str(tmp_path / "modules.json")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "LOCAL_WORLD_SIZE": "2"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stderr):
        pipe.close()


def start(process: subprocess.Popen, folder: Path, seconds: str, code: str) -> None:
    """Start two ranks, as tasks/gang/ranks.py does."""
    arguments = [*network.meeting(1, 0, "127.0.0.1", 0), "--rdzv-id", "x", "--nproc-per-node", "2"]
    arguments += ["--log-dir", str(folder / "ranks"), "--redirects", "3", "-m", "toy"]
    environment = os.environ | network.sockets() | {"PYTHONPATH": f"{ROOT}:{folder}", "MINE": "yes", "GANG_KEY": ""}
    line = {"arguments": [*arguments, seconds, code], "environment": environment, "log": str(folder / "log")}
    process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.close()


def said(folder: Path) -> str:
    return "".join(file.read_text() for file in (folder / "ranks").rglob("stdout.log"))


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_are_forks_that_have_the_imports(ahead, tmp_path, code):
    start(ahead, tmp_path, "0", str(code))
    assert (ahead.wait(60) == 0) == (code == 0), (tmp_path / "log").read_text()
    text = said(tmp_path)
    assert text.count(f"known True parent {ahead.pid} mine yes") == 2, text
    assert text.count("leader True argument 0") == 2, text
    assert text.count("counts by NVML 1") == 2, text  # torchrun asked for GPUs without initialising CUDA


def test_ranks_end_with_it(ahead, tmp_path):
    start(ahead, tmp_path, "60", "0")
    until = time.monotonic() + 60
    while said(tmp_path).count("leader") < 2:
        assert time.monotonic() < until and ahead.poll() is None
        time.sleep(0.1)
    ranks = psutil.Process(ahead.pid).children(recursive=True)
    assert len(ranks) >= 2
    ahead.send_signal(signal.SIGTERM)
    ahead.wait(60)
    assert not psutil.wait_procs(ranks, 10)[1]


@pytest.mark.parametrize("ahead", ["uses_cuda"], indirect=True)
def test_if_an_import_initialises_cuda_the_ranks_import_the_modules(ahead, tmp_path):
    start(ahead, tmp_path, "0", "0")
    assert ahead.wait(60) == 0, (tmp_path / "log").read_text()
    assert said(tmp_path).count(f"known False parent {ahead.pid} mine yes") == 2, said(tmp_path)


def test_it_ends_if_nobody_needs_it(ahead):
    ahead.stdin.close()
    assert ahead.wait(60) == 0


@pytest.mark.parametrize(("code", "initialised"), [(0, True), (forked_ranks.NOT_INITIALISED, False)])
def test_the_driver_says_whether_cuda_is_initialised(monkeypatch, code, initialised):
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: code)
    monkeypatch.setattr(forked_ranks.ctypes, "CDLL", lambda name: driver)
    assert forked_ranks.has_initialised_cuda() == initialised


def test_a_host_without_a_driver_has_not_initialised_cuda(monkeypatch):
    monkeypatch.setattr(forked_ranks, "DRIVER", "libno_such_driver.so.1")
    assert not forked_ranks.has_initialised_cuda()


def test_a_torchrun_that_has_initialised_cuda_starts_ranks_as_usual(monkeypatch, tmp_path):
    monkeypatch.setattr(SubprocessHandler, "_popen", SubprocessHandler._popen)
    forked_ranks.install()
    monkeypatch.setattr(forked_ranks, "has_initialised_cuda", lambda: True)
    handler = SubprocessHandler(sys.executable, ("-c", "print(7)"), {}, str(tmp_path / "said"), None, 0, None)
    assert handler.proc.wait(60) == 0
    handler._stdout.close()
    assert isinstance(handler.proc, subprocess.Popen) and (tmp_path / "said").read_text() == "7\n"
