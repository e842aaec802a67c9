"""The Kubernetes engine: its manifest against JobSet's and Kubernetes' own types, and what it makes of answers.

No cluster is asked: kubeflow_trainer_api has the types that are generated from the API's schemas, and kubectl is a toy.
"""

import json
import os
import re
import shlex
import stat
import sys
import time
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from conf.load import load
from contract.faults import ConfigError, Fault
from flows import gang
from tasks.gang.board import Board
from tasks.gang.engines import Demand, kubernetes
from tasks.store import open_store
from tests.tasks.gang.conftest import ROOT
from tests.tasks.gang.engines import toy_kubectl

GOLDEN = Path(__file__).parent / "golden"
LEAST = ["kubernetes.image=registry/finetune:1", "kubernetes.claim=runs"]
IB = ["kubernetes.queue=h100", "kubernetes.topology=topology/rack", "gang.network=ib-h100",
      "kubernetes.resources=[rdma/ib=8]", "kubernetes.memory=1800Gi", "kubernetes.secrets=[s3]"]  # fmt: skip
EFA = ["kubernetes.namespace=ml", "gang.network=efa-p5", "kubernetes.resources=[vpc.amazonaws.com/efa=32]",
       "kubernetes.cpu=180", "kubernetes.account=finetune", "kubernetes.pull_secrets=[registry]",
       "kubernetes.selector=[node.kubernetes.io/instance-type=p5.48xlarge]", "kubernetes.host_network=true",
       "kubernetes.env=[TZ=UTC]", "kubernetes.priority=high"]  # fmt: skip


def glm(capsys, monkeypatch, *overrides: str) -> str:
    monkeypatch.setenv("FINETUNE_STORE", "s3://bucket/finetune")
    monkeypatch.setenv("FINETUNE_RUNS", "/shared/runs")
    assert gang.main(["glm47", "--engine", "kubernetes", *LEAST, *overrides]) == 0
    return capsys.readouterr().out


def check(manifest: dict) -> None:
    """Every field is one of the API's and has its type: what the types do not know is gone when they are read."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    found = JobsetV1alpha2JobSet.from_dict(manifest)
    assert found is not None
    assert found.to_dict() == manifest


@pytest.mark.parametrize("name, overrides", [
    ("glm47.jobset.yaml", []), ("glm47-ib.jobset.yaml", IB), ("glm47-efa.jobset.yaml", EFA),
])  # fmt: skip
def test_the_manifest_of_glm47_is_the_golden_one_and_of_the_api_s_types(name, overrides, capsys, monkeypatch):
    text = glm(capsys, monkeypatch, *overrides)
    assert text == (GOLDEN / name).read_text()
    check(yaml.safe_load(text))


@pytest.mark.parametrize("change", [
    lambda job: job.update(backofLimit=0),
    lambda job: job.update(completions="4"),
    lambda job: job["template"]["spec"]["containers"][0].update(envFrm=[]),
    lambda job: job["template"]["spec"]["containers"][0]["env"][0].update(value=1),
    lambda job: job["template"]["spec"]["volumes"][0]["emptyDir"].update(size="1Gi"),
])  # fmt: skip
def test_the_types_would_see_a_wrong_field(change, capsys, monkeypatch):
    manifest = yaml.safe_load(glm(capsys, monkeypatch, *IB))
    change(manifest["spec"]["replicatedJobs"][0]["template"]["spec"])
    with pytest.raises((AssertionError, ValidationError)):
        check(manifest)


def test_hosts_to_be_left_out_are_taken_last(capsys, monkeypatch):
    demand = Demand.of(load("glm47", ["gang.engine=kubernetes", *LEAST]))
    manifest = kubernetes.jobset(demand, "x", ["true"], without=("node7", "node8"))
    check(manifest)
    assert manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["affinity"] == {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "preference": {
                        "matchFields": [
                            {"key": "metadata.name", "operator": "NotIn", "values": ["node7"]},
                            {"key": "metadata.name", "operator": "NotIn", "values": ["node8"]},
                        ]
                    },
                }
            ]
        }
    }


def test_names_are_labels_of_the_domain_name_system_at_any_length():
    run = "0-" + "long-" * 30
    board = Board(open_store("s3://bucket/x"), "train-0123456789abcdef", 99_999)
    pod = f"{kubernetes._name(run, board)}-node-0-9999-abcde"
    assert len(pod) <= 63 and pod[0].isalpha() and "--" not in pod.replace("0-l", "")
    assert kubernetes._name(run, board) != kubernetes._name(run, Board(open_store("s3://bucket/y"), board.gang, 99_999))


@pytest.mark.parametrize("overrides, says", [
    (["gang.engine=kubernetes"], "kubernetes.claim: required"),
    (["kubernetes.env=[HF_TOKEN=x]"], "HF_TOKEN looks like a secret"),
    (["kubernetes.env=[aws_secret_access_key=x]"], "looks like a secret"),
    (["kubernetes.resources=[nvidia.com/gpu=4]"], "nvidia.com/gpu has the key layout.gpus_per_node"),
    (["kubernetes.resources=[rdma/ib]"], "rdma/ib"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(overrides, says):
    with pytest.raises(ConfigError, match=says):
        load("tiny", overrides)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """What the toy's cluster holds; kubectl of this process asks it."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {toy_kubectl.__file__} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TOY_CLUSTER", str(folder))
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    monkeypatch.setattr(kubernetes.client, "POLLED", 0.2)
    return folder


def tiny(*overrides: str) -> Demand:
    return Demand.of(load("tiny", ["gang.engine=kubernetes", "layout.nodes=2", *LEAST, *overrides], illegal=True))


def board(tmp_path: Path) -> Board:
    return Board(open_store(str(tmp_path / "store")), "train-x", 1)


def wait_for(so, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < until
        time.sleep(0.05)


def pods(cluster: Path, *phases: str, **status) -> None:
    items = [
        {
            "metadata": {"labels": {kubernetes.INDEX: str(node)}},
            "spec": {"nodeName": f"host{node}"},
            "status": {"phase": phase, **(status if phase == "Failed" else {})},
        }
        for node, phase in enumerate(phases)
    ]
    partial = cluster / "partial"
    partial.write_text(json.dumps({"items": items}))
    partial.rename(cluster / "pods.json")


def test_capacity_is_the_cluster_s_word(cluster):
    assert kubernetes.capacity(tiny()) is None
    with pytest.raises(Fault, match=r"localqueues.*h100.*not found"):
        kubernetes.capacity(tiny("kubernetes.queue=h100"))
    (cluster / "deny.txt").write_text('error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"')
    with pytest.raises(Fault, match='no matches for kind "JobSet"'):
        kubernetes.capacity(tiny())
    (cluster / "deny.txt").write_text("The connection to the server 10.0.0.1:6443 was refused - did you specify ...?")
    assert "does not answer" in str(kubernetes.capacity(tiny()))


def test_without_kueue_gangs_take_turns(cluster):
    assert kubernetes.turn(tiny("kubernetes.queue=h100")) is None
    assert kubernetes.turn(tiny("kubernetes.namespace=ml")) == "kubernetes--ml"


def test_a_gang_from_the_queue_to_its_end(cluster, tmp_path):
    handle = kubernetes.start(tiny("kubernetes.queue=h100"), board(tmp_path), 2)
    jobset = json.loads((cluster / "jobset.json").read_text())
    jobset["metadata"]["uid"] = "1"
    (cluster / "jobset.json").write_text(json.dumps(jobset | {"spec": jobset["spec"] | {"suspend": True}}))
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for nvidia.com/gpu"}
    (cluster / "workloads.json").write_text(json.dumps({"items": [{"status": {"conditions": [condition]}}]}))
    wait_for(lambda: handle.waits() == "Kueue's queue h100: insufficient quota for nvidia.com/gpu")
    assert handle.alive() == {0: True, 1: True}
    (cluster / "jobset.json").write_text(json.dumps(jobset))
    pods(cluster, "Running", "Pending")
    wait_for(lambda: handle.waits() is None and handle.alive() == {0: True, 1: True})
    ended = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    pods(cluster, "Running", "Failed", containerStatuses=[ended])
    wait_for(lambda: handle.alive() == {0: True, 1: False})
    assert handle.words() == ("host1: OOMKilled: exit code 137",)
    pods(cluster, "Running")  # the other was taken away
    wait_for(lambda: handle.words() == ())
    assert handle.alive() == {0: True, 1: False}
    handle.cancel()
    assert handle.alive() == {0: False, 1: False}
    assert "delete jobset ft-tiny" in (cluster / "calls.txt").read_text()


def test_a_cluster_that_does_not_answer_knows_nothing(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes.client, "STALE", 0.5)
    handle = kubernetes.start(tiny(), board(tmp_path), 2)
    wait_for(lambda: handle.alive() == {0: True, 1: True})
    (cluster / "deny.txt").write_text("Unable to connect to the server: EOF")
    wait_for(lambda: handle.alive() == {0: None, 1: None})
    (cluster / "deny.txt").unlink()
    handle.cancel()


def test_hosts_that_there_are(cluster):
    assert kubernetes.available(tiny()) is None  # who may not see nodes
    ready = {"type": "Ready", "status": "True"}
    fits = {"conditions": [ready], "allocatable": {"nvidia.com/gpu": "8", "cpu": "180"}}
    gpus = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    nodes = {
        "fits": ({"taints": gpus}, fits),
        "also": ({"taints": [{"key": "maintenance", "effect": "PreferNoSchedule"}]}, fits),
        "cordoned": ({"unschedulable": True}, fits),
        "tainted": ({"taints": [*gpus, {"key": "other-team", "effect": "NoSchedule"}]}, fits),
        "without GPUs": ({}, fits | {"allocatable": {"cpu": "180"}}),
        "away": ({}, fits | {"conditions": [ready | {"status": "Unknown"}]}),
    }
    items = [{"metadata": {"name": name}, "spec": spec, "status": status} for name, (spec, status) in nodes.items()]
    (cluster / "nodes.json").write_text(json.dumps({"items": items}))
    assert kubernetes.available(tiny("kubernetes.selector=[kind=h100]")) == 2
    assert kubernetes.available(tiny(), ("also",)) == 1
    assert kubernetes.available(tiny("layout.gpus_per_node=9")) == 0
    assert "get nodes --output=json --selector=kind=h100" in (cluster / "calls.txt").read_text()


def test_a_store_that_pods_do_not_have_is_named(cluster, tmp_path):
    with pytest.raises(Fault, match=r"FINETUNE_STORE: /elsewhere: pods reach s3:// stores, and folders in"):
        kubernetes.start(tiny(), Board(open_store("/elsewhere"), "train-x", 1), 2)


def test_words_of_pods_that_cannot_begin_or_were_taken_back():
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}
    image = {"state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
    assert kubernetes.words_of([
        {"status": {"phase": "Pending", "conditions": [unschedulable]}},
        {"spec": {"nodeName": "a"}, "status": {"phase": "Pending", "containerStatuses": [image]}},
        {"spec": {"nodeName": "b"}, "status": {"phase": "Failed", "reason": "Evicted", "message": "low on disk",
                                               "conditions": [taken]}},
        {"spec": {"nodeName": "c"}, "status": {"phase": "Running"}},
    ]) == (
        "no node yet: PodScheduled Unschedulable: 0/4 nodes",
        "a: ErrImagePull: denied",
        "b: Evicted: low on disk",
        "b: DisruptionTarget PreemptionByScheduler: preempted",
    )  # fmt: skip


def test_the_chart_s_role_has_the_rights_that_the_flow_needs():
    lines = re.findall(r"^- \{apiGroups.*$", (ROOT / "deploy/helm/templates/access.yaml").read_text(), re.MULTILINE)
    allowed = {
        (resource, verb)
        for rule in yaml.safe_load("\n".join(lines))
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {("jobsets", verb) for verb in ("create", "get", "list", "delete")} | {("pods", "get")}
    assert needed | {("workloads", "get"), ("localqueues", "get"), ("jobs", "create"), ("pods", "watch")} <= allowed


@pytest.mark.parametrize("page", ["slurm"])
def test_what_a_page_prints_is_what_its_flow_submits(page, capsys):
    """The line of flows.gang and that of flows.finetune name the same keys."""
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    words = [
        shlex.split(line)[2:]
        for line in re.findall(r"^    (python -m flows\.(?:gang|finetune) mine .*)$", text, re.MULTILINE)
    ]
    (printed,) = [one[1:] for one in words if one[0] == "flows.gang"]
    (submitted,) = [one[1:] for one in words if one[0] == "flows.finetune"]
    keys = {word for word in printed if "=" in word}
    assert keys | {f"gang.engine={page}"} == {word.split("#")[0].strip() for word in submitted if "=" in word}
    assert gang.main(["glm47", *(word for word in printed[1:] if word not in (">", "job.sh"))]) == 0
    assert capsys.readouterr().out
