"""Engine for Kubernetes: members as pods of one JobSet, which Kueue admits whole or leaves in its queue.

    python -m flows.gang NAME --engine kubernetes        prints the manifest

The cluster needs Kubernetes 1.29 or newer with JobSet, and Kueue if several users' gangs compete. The flow runs on any
host where kubectl reaches the cluster: outside of it, or in a pod whose service account may create JobSets.

Why JobSet: a PyTorchJob has a separate rendezvous, which the board replaces, and Kubeflow's newer TrainJob creates a
JobSet itself. Why Kueue: it works together with the cluster's scheduler and gives a gang all hosts at once, while
Volcano would replace that scheduler. A pod that ends does not end the others (backoffLimitPerIndex), as the controller
stops them after it has found the cause. Kubernetes restarts no pod, as the controller starts new attempts.

jobset.yaml has the manifest; a test checks it against JobSet v1alpha2 (tests/tasks/gang/engines/test_kubernetes.py).

NeMo-Run 0.11's KubeflowExecutor is not used: it creates TrainJobs, whose operator starts torchrun itself.

Not covered: Volcano, dynamic resource allocation.
"""

import json
import re
from pathlib import Path
from string import Template
from typing import Any

import yaml

from conf.schema.clusters import Kubernetes
from contract import checksums
from contract.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import Demand, client, grace, guarded
from tasks.gang.engines.client import Polled, State
from tasks.run.places import runs_folder

LEAVE_WITHIN = 30.0  # seconds after the grace of pods, in which the cluster removes them
MANIFEST = Path(__file__).with_name("jobset.yaml")
NO_RDMA = (None, "ethernet")
QUEUE = "kueue.x-k8s.io/queue-name"
JOB = "kueue.x-k8s.io/job-uid"
INDEX = "batch.kubernetes.io/job-completion-index"
REMOVE = ("--ignore-not-found", "--wait=false", "--cascade=foreground")
AWAY = re.compile(
    r"[Uu]nable to connect|connection .* refused|timed? ?out|ServiceUnavailable|InternalError|TooMany|EOF|no answer"
)


class Pods(Polled):
    """Pods of one JobSet."""

    def __init__(self, kubectl: list[str], name: str, n: int, grace: int):
        self.kubectl, self.name, self.grace = kubectl, name, grace
        self._seen: set[int] = set()
        super().__init__(n, self._look)

    def cancel(self) -> None:
        client.run([*self.kubectl, "delete", "jobset", self.name, *REMOVE])
        self._seen |= {*range(self.n)}
        self.wait_for_end(self.grace + LEAVE_WITHIN)

    def _look(self) -> State | None:
        jobset = self._get("jobset", self.name)
        pods = self._get("pods", f"--selector=jobset.sigs.k8s.io/jobset-name={self.name}")
        if jobset is None or pods is None:
            return None
        waits = None
        if jobset.get("spec", {}).get("suspend"):
            queue = jobset["metadata"]["labels"].get(QUEUE, "")
            workload = self._get("workloads.kueue.x-k8s.io", f"--selector={JOB}={jobset['metadata']['uid']}")
            waits = f"Kueue's queue {queue}: {_quota((workload or {}).get('items', []))}"
        items = pods.get("items", [])  # kubectl prints nothing if no pod fits
        phases = dict(_index(pod) for pod in items)
        self._seen |= {*phases}
        return State(alive_of(phases, self.n, self._seen), waits, words_of(items))

    def _get(self, *what: str) -> dict[str, Any] | None:
        """The object that kubectl gets; empty if there is none, None if kubectl fails."""
        result = client.run([*self.kubectl, "get", *what, "--ignore-not-found", "--output=json"])
        return None if result.code else json.loads(result.output or "{}")


def turn(demand: Demand) -> str | None:
    """Name of the lock. Without Kueue a gang gets its hosts one by one, so gangs must take turns."""
    section = demand.kubernetes
    return None if section.queue else f"kubernetes-{section.context or ''}-{section.namespace or ''}"


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    """Raise a Fault if the cluster would never accept such a JobSet. Its queue decides when the JobSet runs."""
    section = demand.kubernetes
    results = [_create(section, jobset(demand, "test", ["true"]), "--dry-run=server")]
    if section.queue:
        results.append(client.run([*_kubectl(section), "get", "localqueues.kueue.x-k8s.io", section.queue]))
    line = "; ".join(result.line for result in results if result.code)
    if line and not AWAY.search(line):
        raise Fault(f"kubernetes: {line}")
    return f"the Kubernetes cluster does not answer ({line})" if line else None


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    """Number of ready nodes, used or not. Nodes that an autoscaler would add do not count yet."""
    section, each = demand.kubernetes, demand.gpus_per_node
    selector = [f"--selector={','.join(section.selector)}"] if section.selector else []
    result = client.run([*_kubectl(section), "get", "nodes", "--output=json", *selector])
    if result.code:  # for example without the right to list nodes
        return None
    nodes = json.loads(result.output)["items"]
    return sum(node["metadata"]["name"] not in without and _usable(node, section, each) for node in nodes)


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Pods:
    section = demand.kubernetes
    place = board.store.uri.removeprefix("file://")
    if not board.store.uri.startswith("s3:") and not Path(place).is_relative_to(runs_folder()):
        raise Fault(f"FINETUNE_STORE: {place}: pods reach s3:// stores, and folders in FINETUNE_RUNS, {runs_folder()}")
    old = f"--selector=finetune/gang={_label(board)}"  # of an earlier controller that has died
    client.run([*_kubectl(section), "delete", "jobsets", old, *REMOVE])
    created = _create(section, _of(demand, board, without))
    if created.code:
        raise (ConnectionError if AWAY.search(created.line) else Fault)(f"kubernetes: {created.line}")
    return Pods(_kubectl(section), _name(demand.name, board), n, grace(demand.gang))


def submission(demand: Demand, board: Board) -> str:
    return yaml.safe_dump(_of(demand, board), sort_keys=False, width=1000)


def alive_of(pods: dict[int, str], n: int, seen: set[int]) -> dict[int, bool | None]:
    """State of each member from the phases of pods. A pod that was never seen waits; a lost one has ended."""
    phases = {node: pods.get(node) for node in range(n)}
    return {
        node: node not in seen if phase is None else None if phase == "Unknown" else phase in ("Pending", "Running")
        for node, phase in phases.items()
    }


def words_of(pods: list[dict[str, Any]]) -> tuple[str, ...]:
    """The cluster's messages on pods that failed or cannot start, with the node's name if they have one."""
    words: dict[str, None] = {}
    for pod in pods:
        status, node = pod.get("status", {}), pod.get("spec", {}).get("nodeName", "no node yet")
        messages = [(status.get("reason"), status.get("message"))] if status.get("phase") == "Failed" else []
        for condition in status.get("conditions", []):
            type_, holds = condition["type"], condition["status"] == "True"
            if (type_ == "DisruptionTarget" and holds) or (type_ == "PodScheduled" and not holds):
                messages.append((f"{type_} {condition.get('reason', '')}", condition.get("message")))
        for container in status.get("containerStatuses", []):
            state = container.get("state", {})
            ended, waits = state.get("terminated", {}), state.get("waiting", {})
            if ended.get("exitCode"):
                messages.append((ended.get("reason"), f"exit code {ended['exitCode']}"))
            elif waits.get("reason", "ContainerCreating") not in ("ContainerCreating", "PodInitializing"):
                messages.append((waits["reason"], waits.get("message")))
        words |= {f"{node}: {': '.join(filter(None, pair))}": None for pair in messages if any(pair)}
    return tuple(words)


def _create(section: Kubernetes, what: dict[str, Any], *more: str) -> client.Result:
    return client.run([*_kubectl(section), "create", "--filename=-", "--output=name", *more], json.dumps(what))


def _of(demand: Demand, board: Board, without: tuple[str, ...] = ()) -> dict[str, Any]:
    member = guarded(demand.gang, board, "$(JOB_COMPLETION_INDEX)", demand.kubernetes.python)
    return jobset(demand, _name(demand.name, board), member, _label(board), without)


def jobset(
    demand: Demand, name: str, arguments: list[str], gang: str | None = None, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The manifest of a JobSet. Its pods run these arguments, and prefer other nodes than `without`."""
    section = demand.kubernetes
    resources = {section.gpus: str(demand.gpus_per_node)} if section.gpus else {}
    resources |= {name: str(value) for name in ("cpu", "memory") if (value := getattr(section, name))}
    resources |= dict(setting.split("=", 1) for setting in section.resources)
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in without]  # one value each
    values = section.model_dump() | {
        "name": name,
        "run": demand.name[:63].strip("-"),
        "gang": gang,
        "nodes": demand.nodes,
        "grace": grace(demand.gang) + 1,
        "command": arguments,
        "env": _variables(section),
        "runs": str(runs_folder()),  # pods have this folder at the same path as the flow
        "secrets": [{"secretRef": {"name": secret}} for secret in section.secrets],
        "resources": resources,
        "capabilities": [] if demand.gang.network in NO_RDMA else ["IPC_LOCK"],  # adapters read pinned memory
        "host_network": section.host_network or None,
        "dns_policy": "ClusterFirstWithHostNet" if section.host_network else None,
        "pull_secrets": [{"name": secret} for secret in section.pull_secrets],
        "selector": dict(label.split("=", 1) for label in section.selector),
        "tolerations": [{"key": key, "operator": "Exists"} for key in section.tolerations],
        "preferences": [{"weight": 100, "preference": {"matchFields": fields}}] if without else [],
    }
    text = Template(MANIFEST.read_text("utf-8")).substitute({key: json.dumps(value) for key, value in values.items()})
    return _with_values(yaml.safe_load(text))


def _variables(section: Kubernetes) -> list[dict[str, Any]]:
    fields = {"GANG_ADDRESS": "status.podIP", "GANG_HOST": "spec.nodeName"}
    if section.topology:  # Kueue then places pods with neighbouring numbers next to each other
        fields["GANG_PLACE"] = f"metadata.annotations['{INDEX}']"
    env: list[dict[str, Any]] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    env += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    return env + [{"name": name, "value": value} for name, value in (pair.split("=", 1) for pair in section.env)]


def _with_values(content: Any) -> Any:
    """The content without keys that have no value."""
    if isinstance(content, list):
        return [_with_values(value) for value in content]
    if not isinstance(content, dict):
        return content
    kept = {key: _with_values(value) for key, value in content.items()}
    return {key: value for key, value in kept.items() if value not in (None, {}, [])}


def _kubectl(section: Kubernetes) -> list[str]:
    pairs = (("context", section.context), ("namespace", section.namespace))
    return ["kubectl", *(f"--{name}={value}" for name, value in pairs if value)]


def _usable(node: dict[str, Any], section: Kubernetes, needed: int) -> bool:
    spec, status = node.get("spec", {}), node.get("status", {})
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in status.get("conditions", ()))
    taints = [taint["key"] for taint in spec.get("taints", ()) if taint["effect"] != "PreferNoSchedule"]
    gpus = int(status.get("allocatable", {}).get(section.gpus, 0)) if section.gpus else needed
    return ready and not spec.get("unschedulable") and {*taints} <= {*section.tolerations} and gpus >= needed


def _label(board: Board) -> str:
    """Label of a gang. It includes the store, as gangs in different stores may have the same name."""
    return checksums.of(f"{board.store.uri} {board.gang}")[:12]


def _name(run: str, board: Board) -> str:
    """Name of the JobSet. It begins with a letter and leaves room for the 20 characters that names of pods add."""
    return f"ft-{run[:20].rstrip('-')}-{_label(board)[:8]}-{board.attempt}"


def _index(pod: dict[str, Any]) -> tuple[int, str]:
    metadata = pod["metadata"]
    return int((metadata.get("labels", {}) | metadata.get("annotations", {}))[INDEX]), pod["status"].get("phase", "")


def _quota(workloads: list[dict[str, Any]]) -> str:
    conditions = [entry for load in workloads for entry in load.get("status", {}).get("conditions", [])]
    waiting = [entry for entry in conditions if entry["type"] == "QuotaReserved" and entry["status"] != "True"]
    return waiting[0].get("message", "") if waiting else "not considered yet"
