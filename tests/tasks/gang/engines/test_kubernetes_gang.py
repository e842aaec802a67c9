"""A gang of four pods on Kubernetes: kubectl is real, pods are processes, one is evicted.

The API server is tests/support/kubernetes_api.py, or with API_SERVER=real a kube-apiserver with etcd. The controller
has the rights of the chart's service account, no more.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support import kubernetes_nodes, kubernetes_server
from tests.support.kubernetes_server import helm, kubectl
from tests.tasks.gang import driver
from tests.tasks.gang.conftest import ROOT, losses, same, wait_for

ACCOUNT = "ml:finetune-flow"


@pytest.fixture
def api(tmp_path):
    with kubernetes_server.server(tmp_path) as running:
        chart = helm("template", "finetune", ROOT / "deploy/helm", "--namespace=ml", "--set=image=r.example.com/f:1")
        access = [
            one for one in yaml.safe_load_all(chart.stdout)
            if one and one["kind"] in ("ServiceAccount", "Role", "RoleBinding")
        ]  # fmt: skip
        created = kubectl(running, "create", "-f", "-", text=yaml.safe_dump_all(access))
        assert created.returncode == 0, created.stderr
        yield running


@pytest.fixture
def nodes(api, tmp_path):
    with kubernetes_nodes.running(api, tmp_path / "pods") as running:
        yield running


@pytest.fixture
def train(api, work, tmp_path):
    """train() -> a controller under way, and its folder."""
    running: list[subprocess.Popen] = []
    folder = work / tmp_path.name
    folder.mkdir()
    keys = {
        "layout.nodes": 4,
        "train.micro_batch": 1,
        "gang.engine": "kubernetes",
        "gang.start_within": 200,
        "kubernetes.image": "r.example.com/f:1",
        "kubernetes.claim": "runs",
        "kubernetes.gpus": "null",
        "kubernetes.folder": ROOT,  # a pod is a process of this host
        "kubernetes.python": sys.executable,
        "paths.data": work / "one/data",
    }
    environment = os.environ | {
        "KUBECONFIG": api.config(ACCOUNT),
        "FINETUNE_RUNS": str(work),
        "PATH": f"{Path(kubernetes_server.program('kubectl')).parent}:{os.environ['PATH']}",
    }

    def train(*more: str) -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, driver.__file__, "train", work / "conf.yaml", folder, work / "store"]
        command += [*(f"{key}={value}" for key, value in keys.items()), *more]
        with (folder / "output.txt").open("a") as output:
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        return running[-1], folder

    yield train
    for process in running:
        process.kill()
        process.wait()


def step(folder: Path) -> int:
    return max(losses(folder / "files"), default=0) if (folder / "files/metrics.jsonl").exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evicted_pod_returns_and_the_losses_are_those_of_one_host(train, nodes, alone):
    began = time.monotonic()
    running, folder = train()
    wait_for(lambda: step(folder) >= 12 or running.poll() is not None, 240)
    assert len(nodes.running()) == 4, (folder / "output.txt").read_text()
    first, evicted_at = time.monotonic() - began, step(folder)
    name = nodes.evict("host2")
    assert running.wait(300) == 0, (folder / "output.txt").read_text()
    output = (folder / "output.txt").read_text()
    assert "Evicted" in output and "attempt 2" in output and "attempt 3" not in output
    ended = [(jobset, node, end) for jobset, node, end in nodes.seen if node == "host2"]
    assert len({jobset for jobset, *_ in ended}) == 2  # host2 has a pod in both attempts
    assert ended[0][2] == "137" and name.startswith(ended[0][0])
    assert same(losses(folder / "files"), alone)
    assert nodes.errors == []
    wait_for(lambda: not nodes.jobsets.objects and not nodes.pods.objects, 60)
    print(f"step {evicted_at} after {first:.0f} s; all after {time.monotonic() - began:.0f} s; {nodes.seen}")


@pytest.fixture
def jobset(api):
    """jobset(name) -> create one of two pods, as the chart's service account."""

    def create(name: str) -> None:
        env = [{"name": "PATH", "value": "/bin:/usr/bin"}]
        member = {"name": "member", "image": "i", "command": ["sleep", "60"], "env": env, "workingDir": "/"}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [member]}
        template = {"metadata": {"labels": {"finetune/run": name}}, "spec": pod}
        job = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "template": template}
        content = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": {"finetune/gang": name}},
            "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
        }
        created = kubectl(api, "create", "-f", "-", text=yaml.safe_dump(content), token=ACCOUNT)
        assert created.returncode == 0, created.stderr

    return create


def delete(api, name: str) -> None:
    how = ["--cascade=foreground", "--wait=false"]
    gone = kubectl(api, "delete", "jobsets", f"--selector=finetune/gang={name}", *how, token=ACCOUNT)
    assert gone.returncode == 0, gone.stderr


def test_a_jobset_takes_its_pods_with_it_and_the_rights_are_the_chart_s(api, nodes, jobset):
    jobset("x")
    wait_for(lambda: {*nodes.running()} == {"host0", "host1"}, 30)
    for verb, kind in (("get", "secrets"), ("get", "deployments")):
        refused = kubectl(api, verb, kind, token=ACCOUNT)
        assert refused.returncode == 1 and "forbidden" in refused.stderr
    delete(api, "x")
    wait_for(lambda: not nodes.jobsets.objects and not nodes.pods.objects, 30)
    assert [end for *_, end in nodes.seen] == ["deleted"] * 2 and nodes.errors == []


@pytest.mark.skipif(kubernetes_server.REAL, reason="faults of the test's own server")
def test_watches_start_again_after_410_and_a_stale_write_is_made_again_after_409(api, nodes, jobset):
    """Every status of a pod meets another writer once, and the server forgets its events before each pod."""
    stale, lists = [], nodes.pods.lists

    def fault(request) -> None:
        if request.sub == "status" and request.name not in stale:
            stale.append(request.name)
            found = api.cluster.get(request)
            api.cluster.write(
                request,
                "MODIFIED",
                found
                | {
                    "metadata": {**found["metadata"], "annotations": {"by": "other"} | found["metadata"]["annotations"]}
                },
            )
            api.cluster.forget()

    api.cluster.before_write = fault
    jobset("again")
    wait_for(lambda: {*nodes.running()} == {"host0", "host1"}, 30)
    assert len(stale) == 2 and nodes.pods.lists > lists
    kept = [pod["metadata"]["annotations"].get("by") for pod in nodes.pods.objects.values()]
    assert kept == ["other"] * 2  # the first writer's change is not lost
    delete(api, "again")
    wait_for(lambda: not nodes.pods.objects, 30)
    assert nodes.errors == []
