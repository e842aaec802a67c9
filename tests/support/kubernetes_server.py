"""helm and kubectl, and the API server of a test: kubernetes_api.py, or a real kube-apiserver with etcd.

    with server(folder) as api: kubectl(api, "get", "pods")

Programs are looked for in KUBEBUILDER_ASSETS (the folder of envtest), in runs/kubernetes (make kubernetes) and on PATH.
If kube-apiserver and etcd are in one of these folders and API_SERVER is `real`, they are the server.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.installation import runs_folder
from tests.support import kubernetes_api
from tests.support.kubernetes_api import ADMIN, Server

REAL = os.environ.get("API_SERVER") == "real"
NAMESPACE = "ml"
INT_OR_STRING = ("IoK8sApimachineryPkgUtilIntstrIntOrString", "IoK8sApimachineryPkgApiResourceQuantity")


def program(name: str) -> str:
    places = (os.environ.get("KUBEBUILDER_ASSETS"), str(runs_folder() / "kubernetes"), os.environ.get("PATH"))
    found = shutil.which(name, path=os.pathsep.join(filter(None, places)))
    return found or pytest.skip(f"no {name} here: make kubernetes gets it")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("helm"), *arguments], capture_output=True, text=True, timeout=120)


def kubectl(
    api: Server, *arguments: str | Path, text: str = "", token: str = ADMIN
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": api.config(token, NAMESPACE), "HOME": str(api.folder)}
    command = [program("kubectl"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, env=environment)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    kubectl_ = program("kubectl")
    with _real(folder) if REAL else kubernetes_api.running(folder) as api:
        assert kubectl_ and kubectl(api, "get", "namespaces").returncode == 0
        yield api


@contextlib.contextmanager
def _real(folder: Path) -> Iterator[Server]:
    """etcd and kube-apiserver, with the types of JobSet and Kueue; no other controller."""
    etcd, peer, port = _free_port(), _free_port(), _free_port()
    tokens = [f'{ADMIN},{ADMIN},1,"system:masters"', f"{NAMESPACE}:finetune-flow,{_account('finetune-flow')},2"]
    (folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
    subprocess.run(["openssl", "genrsa", "-out", folder / "accounts.key", "2048"], check=True, capture_output=True)
    commands = [
        [program("etcd"), "--data-dir", folder / "etcd", "--listen-client-urls", f"http://127.0.0.1:{etcd}",
         "--advertise-client-urls", f"http://127.0.0.1:{etcd}", "--listen-peer-urls", f"http://127.0.0.1:{peer}"],
        [program("kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={port}",
         "--bind-address=127.0.0.1", f"--cert-dir={folder}", "--service-cluster-ip-range=10.0.0.0/24",
         "--service-account-issuer=https://test", f"--service-account-key-file={folder}/accounts.key",
         f"--service-account-signing-key-file={folder}/accounts.key", f"--token-auth-file={folder}/tokens.csv",
         "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"],
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("w"))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.kill)
        api = Server(f"https://127.0.0.1:{port}", folder)
        _wait_for(lambda: kubectl(api, "get", "--raw", "/readyz").stdout == "ok", folder)
        kinds = [
            crd("jobset.x-k8s.io", "v1alpha2", "JobSet"),
            *(crd("kueue.x-k8s.io", "v1beta1", kind) for kind in ("LocalQueue", "Workload")),
        ]
        for content in [*kinds, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]:
            created = kubectl(api, "create", "--validate=false", "-f", "-", text=yaml.safe_dump(content))
            assert created.returncode == 0, created.stderr
        for kind in ("jobsets", "localqueues", "workloads"):
            _wait_for(lambda kind=kind: kubectl(api, "get", kind).returncode == 0, folder)
        yield api


def _account(name: str) -> str:
    return f"system:serviceaccount:{NAMESPACE}:{name}"


def _wait_for(so: Any, folder: Path, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < until, (folder / "kube-apiserver.log").read_text()[-2000:]
        time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def crd(group: str, version: str, kind: str) -> dict[str, Any]:
    """A CustomResourceDefinition: JobSet's with all its fields, the others with any."""
    plural = kubernetes_api.plural(kind)
    schema: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if kind == "JobSet":
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

        whole = JobsetV1alpha2JobSet.model_json_schema()
        schema = _structural(whole, whole["$defs"])
        schema["properties"]["metadata"] = {"type": "object"}
    versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema},
                 "subresources": {"status": {}}}]  # fmt: skip
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
    }


def _structural(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """What Kubernetes accepts as a schema: no references, no null, no titles."""
    if "anyOf" in schema:
        (schema,) = [one for one in schema["anyOf"] if one != {"type": "null"}] or [{}]
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in INT_OR_STRING:
            return {"x-kubernetes-int-or-string": True}
        schema = defs[name]
        if "anyOf" in schema:
            return _structural(schema, defs)
    found: dict[str, Any] = {key: schema[key] for key in ("type", "enum", "required") if key in schema}
    if "properties" in schema:
        found["properties"] = {key: _structural(one, defs) for key, one in schema["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _structural(schema["additionalProperties"], defs)
    if "items" in schema:
        found["items"] = _structural(schema["items"], defs)
    return found if "type" in found else {"x-kubernetes-preserve-unknown-fields": True}
