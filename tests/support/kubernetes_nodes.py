"""JobSet's controller and the nodes of a cluster, played against an API server: each pod is a process of this host.

    with running(server, logs) as nodes: ...; nodes.evict("host2")

It lists and watches JobSets and pods as controllers do, and starts again after 410. A pod of a JobSet gets a node, its
command runs as the pod says (arguments, variables, grace, standard input), and its end becomes the pod's status. A pod
that failed is not replaced, as the JobSets here say. A JobSet that is deleted in the foreground takes its pods with it.
"""

import contextlib
import json
import os
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.kubernetes_api import ADMIN, Server, now

INDEX = "batch.kubernetes.io/job-completion-index"
OWNER = "jobset.sigs.k8s.io/jobset-name"
JOBSETS, PODS = "/apis/jobset.x-k8s.io/v1alpha2", "/api/v1"
RESOURCE = {JOBSETS: "jobsets", PODS: "pods"}
ROUND = 0.2  # seconds


class Answer(Exception):
    def __init__(self, code: int, text: str):
        super().__init__(f"{code}: {text}")
        self.code = code


class Client:
    """Requests of an administrator."""

    def __init__(self, server: Server, namespace: str):
        self.url, self.namespace = server.url, namespace
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    def path(self, kind: str, name: str = "") -> str:
        return f"{kind}/namespaces/{self.namespace}/{RESOURCE[kind]}" + (f"/{name}" if name else "")

    def open(self, method: str, path: str, content: Any = None) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, context=self.context, timeout=60)
        except urllib.error.HTTPError as error:
            raise Answer(error.code, error.read().decode()) from None

    def ask(self, method: str, path: str, content: Any = None) -> dict[str, Any]:
        with self.open(method, path, content) as answer:
            return json.load(answer)

    def change(self, kind: str, name: str, change, sub: str = "") -> None:
        """Change the newest version of an object. After 409 do it again."""
        while True:
            with contextlib.suppress(ConflictAnswer):
                content = self.ask("GET", self.path(kind, name))
                change(content)
                return self._put(self.path(kind, name) + sub, content)

    def _put(self, path: str, content: dict[str, Any]) -> None:
        try:
            self.ask("PUT", path, content)
        except Answer as answer:
            raise (ConflictAnswer if answer.code == 409 else Answer)(answer.code, str(answer)) from None


class ConflictAnswer(Answer):
    pass


class Cache:
    """The objects of one kind, as an informer has them."""

    def __init__(self, client: Client, kind: str, changed: threading.Event):
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists = 0  # times that the whole list was read
        self._client, self._kind, self._changed, self.over = client, kind, changed, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(OSError, Answer, ValueError):
                found = self._client.ask("GET", self._client.path(self._kind))
                self.lists += 1
                self.objects = {item["metadata"]["name"]: item for item in found["items"]}
                self._changed.set()
                version = found["metadata"]["resourceVersion"]
                while version and not self.over.is_set():
                    version = self._watch(version)
            self.over.wait(0.1)

    def _watch(self, version: str) -> str | None:
        """Follow the events since a version. Return the newest one, or None if the list must be read again."""
        query = f"?watch=true&allowWatchBookmarks=true&timeoutSeconds=5&resourceVersion={version}"
        with self._client.open("GET", self._client.path(self._kind) + query) as events:
            for line in events:
                event = json.loads(line)
                if event["type"] == "ERROR":  # 410: the server has forgotten this version
                    return None
                content = event["object"]
                version = content["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self.objects.pop(content["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self.objects[content["metadata"]["name"]] = content
                self._changed.set()
        return version


class Nodes:
    def __init__(self, server: Server, environment: dict[str, str], logs: Path, namespace: str):
        self.client, self.environment, self.logs = Client(server, namespace), environment, logs
        self.changed, self.over = threading.Event(), threading.Event()
        self.jobsets = Cache(self.client, JOBSETS, self.changed)
        self.pods = Cache(self.client, PODS, self.changed)
        self.processes: dict[str, subprocess.Popen] = {}
        self.killed_at: dict[str, float] = {}
        self.created: set[str] = set()  # uids of JobSets
        self.evicted: set[str] = set()  # pods whose end evict() reports
        self.seen: list[tuple[str, str, str]] = []  # JobSet, node and end of each pod
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def evict(self, node: str) -> str:
        """What a kubelet without memory does: kill the pod's processes at once. The pod's name."""
        (pod,) = [
            pod for pod in self.pods.objects.values()
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"
        ]  # fmt: skip
        name = pod["metadata"]["name"]
        self.evicted.add(name)
        kill(self.processes[name])
        self._ended(name, 137, {"reason": "Evicted", "message": "The node was low on resource: memory."})
        return name

    def running(self) -> dict[str, str]:
        """The pod on each node."""
        return {
            pod["spec"]["nodeName"]: name
            for name, pod in self.pods.objects.items()
            if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def stop(self) -> None:
        self.over.set()
        self._thread.join()
        for cache in (self.jobsets, self.pods):
            cache.over.set()
        for process in self.processes.values():
            kill(process)

    def _work(self) -> None:
        while not self.over.is_set():
            self.changed.wait(ROUND)
            self.changed.clear()
            try:
                self._round()
            except Answer as answer:
                if answer.code not in (404, 409):  # the cache is late
                    self.errors.append(str(answer))
            except OSError:
                self.over.wait(ROUND)

    def _round(self) -> None:
        for name, jobset in [*self.jobsets.objects.items()]:
            if "deletionTimestamp" in jobset["metadata"]:
                self._remove(name)
            elif jobset["metadata"]["uid"] not in self.created and not jobset["spec"].get("suspend"):
                self.created.add(jobset["metadata"]["uid"])
                for pod in pods_of(jobset):
                    self.client.ask("POST", self.client.path(PODS), pod)
        for name, pod in [*self.pods.objects.items()]:
            self._care(name, pod)

    def _remove(self, jobset: str) -> None:
        own = [
            name for name, pod in self.pods.objects.items() if pod["metadata"].get("labels", {}).get(OWNER) == jobset
        ]
        for name in own:
            if "deletionTimestamp" not in self.pods.objects[name]["metadata"]:
                self.client.ask("DELETE", self.client.path(PODS, name), {})
        if not own:
            self.client.change(JOBSETS, jobset, lambda content: content["metadata"].pop("finalizers", None))

    def _care(self, name: str, pod: dict[str, Any]) -> None:
        process, phase = self.processes.get(name), pod.get("status", {}).get("phase")
        if "deletionTimestamp" in pod["metadata"]:
            if process and process.poll() is None:
                moment = time.monotonic()
                if name not in self.killed_at:
                    process.terminate()
                if moment - self.killed_at.setdefault(name, moment) < pod["metadata"]["deletionGracePeriodSeconds"]:
                    return
                kill(process)
            if process and phase == "Running":
                self.seen.append((pod["metadata"]["labels"][OWNER], pod["spec"]["nodeName"], "deleted"))
            self.client.ask("DELETE", self.client.path(PODS, name), {"gracePeriodSeconds": 0})
        elif not process and phase == "Pending":
            self.processes[name] = self._start(name, pod)
            self.client.change(PODS, name, _runs, "/status")
        elif process and process.poll() is not None and phase == "Running" and name not in self.evicted:
            kill(process)
            self._ended(name, process.returncode % 256, {})

    def _start(self, name: str, pod: dict[str, Any]) -> subprocess.Popen:
        (container,) = pod["spec"]["containers"]
        fields = {"status.podIP": "127.0.0.1", "spec.nodeName": pod["spec"]["nodeName"]}
        values = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        values["JOB_COMPLETION_INDEX"] = pod["metadata"]["annotations"][INDEX]
        words = container["command"]
        for key, value in values.items():
            words = [word.replace(f"$({key})", value) for word in words]
        with (self.logs / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                words,
                cwd=container["workingDir"],
                env=self.environment | values,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _ended(self, name: str, code: int, status: dict[str, str]) -> None:
        ends: list[tuple[str, str, str]] = []

        def ended(content: dict[str, Any]) -> None:
            ends.clear()
            if content["status"]["phase"] == "Running":
                terminated = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
                content["status"] |= {"phase": "Failed" if code else "Succeeded", **status}
                content["status"]["containerStatuses"] = [_container(content, {"terminated": terminated})]
                ends.append((content["metadata"]["labels"][OWNER], content["spec"]["nodeName"], f"{code}"))

        self.client.change(PODS, name, ended, "/status")
        self.seen += ends


def pods_of(jobset: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What JobSet's controller, the Job's and the scheduler make of it: a pod per index, each on a node."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], jobset["metadata"]["name"]
    template = job["template"]
    owner = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": name, "uid": jobset["metadata"]["uid"],
             "controller": True, "blockOwnerDeletion": True}  # fmt: skip
    for index in range(job["completions"]):
        metadata = template["metadata"]
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": f"{name}-{replicated['name']}-0-{index}-",
                "labels": metadata["labels"] | {OWNER: name, INDEX: str(index)},
                "annotations": metadata.get("annotations", {}) | {INDEX: str(index)},
                "ownerReferences": [owner],
            },
            "spec": template["spec"] | {"nodeName": f"host{index}"},
        }


def _runs(content: dict[str, Any]) -> None:
    ready = [{"type": "Ready", "status": "True"}]
    content["status"] = {"phase": "Running", "podIP": "127.0.0.1", "startTime": now(), "conditions": ready}
    content["status"]["containerStatuses"] = [_container(content, {"running": {"startedAt": now()}})]


def _container(pod: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {"name": container["name"], "image": container["image"], "imageID": "", "ready": "running" in state,
            "restartCount": 0, "state": state}  # fmt: skip


def kill(process: subprocess.Popen) -> None:
    """The process and all below it, as the end of a container does."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        for one in [found, *found.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                one.kill()
    process.wait()
    assert process.stdin
    process.stdin.close()


@contextlib.contextmanager
def running(server: Server, logs: Path, namespace: str = "ml") -> Iterator[Nodes]:
    logs.mkdir(exist_ok=True)
    nodes = Nodes(server, {**os.environ}, logs, namespace)
    try:
        yield nodes
    finally:
        nodes.stop()
