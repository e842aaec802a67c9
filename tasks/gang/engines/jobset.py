"""JobSet of a gang for Kubernetes: an indexed job with a pod per host.

It refers to secrets by the names of Secrets, to storage by the name of a claim, and to Kueue's queue by a label. A test
checks the manifest against JobSet v1alpha2 (tests/tasks/gang/engines/test_kubernetes.py).
"""

from typing import Any

from tasks.gang.engines import Demand, grace
from tasks.run.places import runs_folder

QUEUE = "kueue.x-k8s.io/queue-name"
FORGOTTEN_AFTER = 3600  # seconds after which Kubernetes removes an ended JobSet, if no controller does
NO_RDMA = (None, "ethernet")


def jobset(
    demand: Demand, name: str, arguments: list[str], labels: dict[str, str] | None = None, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    section = demand.kubernetes
    queue = {QUEUE: section.queue} if section.queue else {}
    priority = {"kueue.x-k8s.io/priority-class": section.priority} if section.priority else {}
    namespace = {"namespace": section.namespace} if section.namespace else {}
    topology = {"kueue.x-k8s.io/podset-preferred-topology": section.topology} if section.topology else {}
    job = {
        "completionMode": "Indexed",  # a pod's index is the number of its member
        "completions": demand.nodes,
        "parallelism": demand.nodes,
        "backoffLimitPerIndex": 0,
        "podReplacementPolicy": "Failed",
        "template": {
            "metadata": {"labels": labels or {}} | ({"annotations": topology} if topology else {}),
            "spec": _pod(demand, arguments) | ({"affinity": _others(without)} if without else {}),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **namespace, "labels": {**(labels or {}), **queue, **priority}},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": False},  # addresses are on the board
            "ttlSecondsAfterFinished": FORGOTTEN_AFTER,
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(demand: Demand, arguments: list[str]) -> dict[str, Any]:
    section = demand.kubernetes
    env: list[dict[str, Any]] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "GANG_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "GANG_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    if section.topology:  # Kueue then places pods with neighbouring numbers next to each other
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env.append({"name": "GANG_PLACE", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    env += [{"name": name, "value": value} for name, _, value in (setting.partition("=") for setting in section.env)]
    resources = {section.gpus: str(demand.gpus_per_node)} if section.gpus else {}
    resources |= {name: str(value) for name in ("cpu", "memory") if (value := getattr(section, name))}
    resources |= dict(setting.split("=", 1) for setting in section.resources)
    container: dict[str, Any] = {
        "name": "member",
        "image": section.image,
        "workingDir": section.folder,
        "command": arguments,
        "stdin": True,  # it stays open without a writer; a member ends when it closes
        "env": env,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": shared()}],
    }
    if section.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in section.secrets]
    if resources:
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    if demand.gang.network not in NO_RDMA:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # adapters read pinned memory
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace(demand.gang) + 1,
        "enableServiceLinks": False,  # otherwise the pod gets a variable for every service of the namespace
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": section.shm}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": section.claim}},
        ],
    }
    if section.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if section.account:
        pod["serviceAccountName"] = section.account
    if section.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in section.pull_secrets]
    if section.selector:
        pod["nodeSelector"] = dict(label.split("=", 1) for label in section.selector)
    if section.tolerations:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in section.tolerations]
    return pod


def _others(without: tuple[str, ...]) -> dict[str, Any]:
    """Affinity that prefers nodes with other names."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in without]  # one value each
    others = {"weight": 100, "preference": {"matchFields": fields}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [others]}}


def shared() -> str:
    """The folder of FINETUNE_RUNS: pods have it at the same path as the flow."""
    return str(runs_folder())
