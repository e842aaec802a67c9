"""Reinforcement learning by Slurm and Kubernetes: one job of all hosts, of which each gets its part.

The engine, its script or manifest, the controller and the members are real. Slurm, kubectl and torchrun are toys.
"""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conf.load import load
from tasks.gang import controller
from tasks.gang.attempt import Gang
from tasks.gang.engines import client, engine_of, kubernetes
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import job_of
from tasks.store import open_store
from tests.tasks.gang.conftest import ROOT
from tests.tasks.gang.engines import toy_kubectl, toy_slurm, toy_torchrun

KEYS = ["hardware.gpu=h100", "train.precision=bf16", "train.micro_batch=8", "layout.nodes=2", "reinforce.hosts=2"]
KEYS += ["reinforce.engine_gpus=4", "layout.gpus_per_node=4", "layout.tp=4", "gang.start_within=60"]
SLURM = ["gang.engine=slurm", f"slurm.python={sys.executable}", f"slurm.setup=[export PYTHONPATH={ROOT}]"]
KUBERNETES = ["gang.engine=kubernetes", "kubernetes.image=registry/finetune:1", "kubernetes.claim=runs"]
KUBERNETES += [f"kubernetes.python={sys.executable}", f"kubernetes.env=[PYTHONPATH={ROOT}]"]


@pytest.fixture
def hosts(tmp_path, monkeypatch) -> Path:
    """The folder that hosts start in, where torch is a toy, and whose toys of schedulers are on PATH."""
    programs = dict.fromkeys(("sbatch", "srun", "squeue", "scancel"), toy_slurm) | {"kubectl": toy_kubectl}
    (tmp_path / "bin").mkdir()
    for name, toy in programs.items():
        program, given = tmp_path / "bin" / name, name if toy is toy_slurm else ""
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {toy.__file__} {given} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("TOY_SLURM", "TOY_CLUSTER", "FINETUNE_RUNS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(client, "POLLED", 0.2)
    startup = tmp_path / "trainer/startup"
    startup.mkdir(parents=True)
    for package in (startup.parent, startup):
        (package / "__init__.py").touch()
    (startup / "torchrun.py").write_text(Path(toy_torchrun.__file__).read_text())
    return tmp_path


def carried_out(folder: Path, *overrides: str) -> tuple[list[str], dict[str, dict]]:
    """Lines of a learning's controller, and what was asked of torchrun, by host."""
    paths = [f"paths.{name}={folder / name}" for name in ("reinforced", "logs")]
    job = job_of("reinforce", load("tiny-rl", [*KEYS, *overrides, *paths]))
    assert job
    (folder / "work").mkdir()
    lines: list[str] = []
    until = time.monotonic() + 120
    work, store = folder / "work", open_store(str(folder / "store"), hasty=True)
    teller, stop = Teller(History("reinforce-x", "tiny-rl", ""), work / "none"), lambda: time.monotonic() > until
    controller.carry_out(Gang("reinforce-x", work, job, store, engine_of(job.run), teller, lines.append, stop))
    return lines, {path.stem: json.loads(path.read_text()) for path in (folder / "logs/asked").iterdir()}


def require_roles(lines: list[str], asked: dict[str, dict]) -> None:
    """Two hosts train as one group, and two answer prompts, each by itself, in the order that the controller says."""
    (line,) = (line for line in lines if line.startswith("attempt 1: ") and " reinforce;" in line)
    order = line.removeprefix("attempt 1: ").partition(" reinforce;")[0].split(", ")
    assert len(order) == 4 and {*order} == {*asked}
    assert all(one["hosts"] == [2, 2] and one["GANG_ATTEMPT"] == "reinforce-x-1" for one in asked.values())
    for place, host in enumerate(order):
        said = " ".join(asked[host]["arguments"])
        if place < 2:
            assert (
                f"--nnodes 2 --rdzv-backend relayed --rdzv-conf rank={place} " in said and "--nproc-per-node 4 " in said
            )
            assert "-m trainer.reinforce /" in said
        else:
            assert "--nnodes 1 --rdzv-backend relayed --rdzv-conf rank=0 " in said and "--nproc-per-node 1 " in said
            assert "-m trainer.reinforcement.engines.guest /" in said


def test_one_job_of_slurm_has_the_hosts_that_train_and_those_of_vllm(hosts):
    lines, asked = carried_out(hosts, *SLURM, f"slurm.folder={hosts}")
    script = (hosts / "script.sh").read_text()
    assert "#SBATCH --nodes=4\n" in script and "#SBATCH --gpus-per-node=4\n" in script
    assert {*asked} == {"n0", "n1", "n2", "n3"}
    require_roles(lines, asked)


def test_one_jobset_of_kubernetes_has_the_hosts_that_train_and_those_of_vllm(hosts):
    over = threading.Event()
    kubelet = threading.Thread(target=run_pods, args=(hosts, over))
    kubelet.start()
    try:
        lines, asked = carried_out(hosts, *KUBERNETES, f"kubernetes.folder={hosts}")
    finally:
        over.set()
        kubelet.join(60)
    spec = json.loads((hosts / "made.json").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {*asked} == {"node0", "node1", "node2", "node3"}
    require_roles(lines, asked)


def run_pods(cluster: Path, over: threading.Event) -> None:
    """Run the pods of the JobSet that is created, as processes, and say in which phase they are."""
    pods: list[subprocess.Popen] = []
    while not over.wait(0.2):
        if not pods and (cluster / "jobset.json").exists() and (text := (cluster / "jobset.json").read_text()):
            (cluster / "made.json").write_text(text)
            job = json.loads(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
            pods = [pod(job["template"]["spec"]["containers"][0], number) for number in range(job["completions"])]
        phases = {None: "Running", 0: "Succeeded"}
        items = [
            {
                "metadata": {"labels": {kubernetes.INDEX: str(number)}},
                "spec": {"nodeName": f"node{number}"},
                "status": {"phase": phases.get(one.poll(), "Failed")},
            }
            for number, one in enumerate(pods)
        ]
        (cluster / "partial").write_text(json.dumps({"items": items}))
        (cluster / "partial").rename(cluster / "pods.json")
    for one in pods:
        assert one.stdin
        one.stdin.close()
        one.wait(40)


def pod(container: dict, number: int) -> subprocess.Popen:
    fields = {"status.podIP": "127.0.0.1", "spec.nodeName": f"node{number}"}
    env = {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }
    command = [word.replace("$(JOB_COMPLETION_INDEX)", str(number)) for word in container["command"]]
    return subprocess.Popen(
        command, cwd=container["workingDir"], env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
