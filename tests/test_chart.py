"""The Helm chart: what helm makes of it, and whether an API server takes all of it.

helm and kubectl are real. The API server is tests/support/kubernetes_api.py, or with API_SERVER=real a kube-apiserver.
"""

import asyncio
import json
import subprocess
from pathlib import Path
from unittest.mock import AsyncMock
from uuid import uuid4

import pytest
import yaml

from conf.load import load
from tests.support import kubernetes_server
from tests.support.kubernetes_server import helm, kubectl

CHART = Path(__file__).parents[1] / "deploy/helm"
IMAGE = "image=registry.example.com/finetune:1"
EVERYTHING = {
    "image": "registry.example.com/finetune:1",
    "pullSecrets": ["registry"],
    "secrets": ["hub", "s3"],
    "store": "s3://bucket/finetune",
    "runs": {"claim": "shared"},
    "gangs": {
        "queue": "gpus",
        "clusterQueue": "h100",
        "network": "ib-h100",
        "resources": {"rdma/ib": 8},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": ["nvidia.com/gpu", "reserved"],
        "cpu": 180,
        "memory": "1800Gi",
        "priority": "high",
        "topology": "topology/rack",
        "listNodes": True,
    },
    "flows": {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "spot", "operator": "Exists"}]},
    "database": {"external": True},
}


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with kubernetes_server.server(tmp_path_factory.mktemp("api")) as running:
        yield running


def rendered(tmp_path: Path, values: dict) -> list[dict]:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    made = helm("template", "finetune", CHART, "--namespace", "ml", "--values", tmp_path / "values.yaml")
    assert made.returncode == 0, made.stderr
    objects = [one for one in yaml.safe_load_all(made.stdout) if one]
    if kubernetes_server.REAL:  # Debian's kube-apiserver is of 1.20, when this version was not final yet
        old = kubernetes_server.program("kube-apiserver")
        if "v1.20" in subprocess.run([old, "--version"], capture_output=True, text=True).stdout:
            for one in objects:
                one["apiVersion"] = one["apiVersion"].replace("policy/v1", "policy/v1beta1")
    return objects


def of(objects: list[dict], kind: str) -> dict[str, dict]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_helm_lint_has_nothing_to_say():
    for values in ([], ["--set", IMAGE]):
        linted = helm("lint", "--strict", CHART, *values)
        assert linted.returncode == 0, linted.stdout
        assert "[WARNING]" not in linted.stdout and "[ERROR]" not in linted.stdout


@pytest.mark.parametrize("values", [{"image": "r.example.com/f:1"}, EVERYTHING], ids=["least", "everything"])
def test_the_api_server_takes_all_of_it(api, tmp_path, values):
    objects = rendered(tmp_path, values)
    text = yaml.safe_dump_all(objects)
    for how in (["--dry-run=server"], []):
        created = kubectl(api, "create", "--output=name", "--filename=-", *how, text=text)
        assert created.returncode == 0, created.stderr
        assert len(created.stdout.split()) == len(objects)
    found = json.loads(kubectl(api, "get", "deployments", "--output=json").stdout)["items"]
    assert {one["metadata"]["name"] for one in found} == {*of(objects, "Deployment")}
    assert kubectl(api, "delete", "--wait=false", "--filename=-", text=text).returncode == 0


@pytest.mark.parametrize("change, says", [
    (lambda one: one["spec"].update(replikas=1), "replikas"),
    (lambda one: one["spec"].update(replicas="one"), "replicas"),
    (lambda one: one["spec"]["selector"]["matchLabels"].update(other="x"), "selector"),
    (lambda one: one["spec"]["template"]["spec"]["volumes"].clear(), "volumeMounts"),
    (lambda one: one["spec"]["template"]["spec"]["containers"][0].pop("name"), "name"),
    (lambda one: one["metadata"]["labels"].update(owner="a b"), "label"),
])  # fmt: skip
def test_the_api_server_would_refuse_a_mistake(api, tmp_path, change, says):
    deployment = of(rendered(tmp_path, {"image": "r.example.com/f:1"}), "Deployment")["finetune-prefect"]
    change(deployment)
    created = kubectl(api, "create", "--dry-run=server", "--filename=-", text=yaml.safe_dump(deployment))
    assert created.returncode == 1 and says in created.stderr


@pytest.mark.parametrize("values, says", [
    ([], "image: required"),
    (["image=a b"], "/image"),
    ([IMAGE, "mlflw.artifacts=/x"], "mlflw"),
    ([IMAGE, "maxUnavailable=-1"], "maxUnavailable"),
    ([IMAGE, "database.password=secret"], "password"),
    ([IMAGE, "workers[0].type=docker"], "type"),
    ([IMAGE, "gangs.clusterQueue=h100"], "gangs.queue: required"),
    ([IMAGE, "gangs.network=infiniband"], "network"),
])  # fmt: skip
def test_a_wrong_value_is_refused_with_its_name(values, says):
    made = helm("template", "finetune", CHART, *(word for value in values for word in ("--set", value)))
    assert made.returncode and says in made.stderr


def test_pods_have_no_rights_and_secrets_are_never_values(tmp_path):
    objects = rendered(tmp_path, EVERYTHING | {"database": {}})
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} == {*container["resources"]}
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= {*container}
            for variable in container["env"]:
                if "PASSWORD" in variable["name"]:
                    assert variable["valueFrom"]["secretKeyRef"]["name"] == "finetune-database"
    assert not of(objects, "Secret")
    servers = {name for kind in ("Deployment", "StatefulSet") for name in of(objects, kind) if "worker" not in name}
    assert servers == {*of(objects, "PodDisruptionBudget")}


def test_the_settings_of_gangs_are_overrides_of_a_configuration(tmp_path):
    """`finetune run NAME $(cat /etc/finetune/gang)` accepts that file of the pods."""
    text = of(rendered(tmp_path, EVERYTHING), "ConfigMap")["finetune-settings"]["data"]["gang"]
    run = load("glm47", text.split())
    wanted = EVERYTHING["gangs"]
    assert run.gang.engine == "kubernetes" and run.gang.network == wanted["network"]
    assert run.kubernetes.model_dump(mode="json") | {"env": ()} == run.kubernetes.model_dump(mode="json") | {
        "namespace": "ml",
        "image": EVERYTHING["image"],
        "claim": "shared",
        "queue": wanted["queue"],
        "priority": wanted["priority"],
        "topology": wanted["topology"],
        "cpu": wanted["cpu"],
        "memory": wanted["memory"],
        "secrets": EVERYTHING["secrets"],
        "pull_secrets": EVERYTHING["pullSecrets"],
        "selector": ["gpu=h100"],
        "tolerations": wanted["tolerations"],
        "resources": ["rdma/ib=8"],
        "env": (),
    }
    least = of(rendered(tmp_path, {"image": "r.example.com/f:1"}), "ConfigMap")["finetune-settings"]["data"]["gang"]
    assert load("glm47", least.split()).kubernetes.queue is None


def test_prefect_s_worker_makes_a_job_for_a_flow_that_the_api_server_takes(api, tmp_path):
    """From the base job template of the chart, and from that of the file with the least that it needs."""
    from prefect.client.schemas.objects import FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    chart = of(rendered(tmp_path, EVERYTHING), "ConfigMap")["finetune-settings"]["data"]["work-pool.json"]
    flow_run = FlowRun(flow_id=uuid4(), name="glm47")
    for text, values in (
        (chart, {"resources": {"requests": {"cpu": "1"}, "limits": {"rdma/ib": "8"}}, "env": {"A": "b"}}),
        ((CHART / "work-pool.json").read_text(), {"image": "r.example.com/f:1", "namespace": "ml"}),
    ):
        template = KubernetesWorkerJobConfiguration.from_template_and_values
        made = asyncio.run(template(json.loads(text), values, client=AsyncMock()))  # no placeholder needs a server
        made.prepare_for_flow_run(flow_run)
        for ignored in ("completions", "parallelism"):  # Prefect wants them here, and Kubernetes ignores them
            del made.job_manifest["spec"]["template"]["spec"][ignored]
        created = kubectl(api, "create", "--dry-run=server", "-f", "-", text=yaml.safe_dump(made.job_manifest))
        assert created.returncode == 0, created.stderr
        (container,) = made.job_manifest["spec"]["template"]["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert container["args"] == ["prefect", "flow-run", "execute"]
        if text == chart:
            assert variables["A"] == "b" and variables["FINETUNE_STORE"] == "s3://bucket/finetune"
            assert container["envFrom"] == [{"secretRef": {"name": name}} for name in ("hub", "s3")]
            assert made.job_manifest["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}
            assert container["image"] == EVERYTHING["image"]
