"""Sections slurm and kubernetes: requests of a run over several hosts to a cluster, if gang.engine names it.

The keys contain no secrets, only names of environment variables and of Kubernetes' Secrets. The layout has the numbers
of hosts and GPUs. Not covered: Slurm's heterogeneous jobs, other schedulers of Kubernetes.
"""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from conf.schema.bearing import NOWHERE
from conf.schema.named import KUBERNETES
from conf.schema.sections import Count, Section, Text

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Setting = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.-]*$")]
Amount = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*(/[A-Za-z0-9_.-]+)?=[0-9]*[1-9][0-9]*(\.[0-9]+)?([KMGTP]i?|m)?$")
]
Limit = Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$")]
Memory = Annotated[str, Field(pattern=r"^[0-9]*[1-9][0-9]*(\.[0-9]+)?[KMGT]i?$")]
Option = Annotated[str, Field(pattern=r"^-")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]

# Names in boto3's standard chain.
AWS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
SECRET = re.compile(r"SECRET|TOKEN|PASSW|PRIVATE|CREDENTIAL|(ACCESS|API)_?KEY", re.IGNORECASE)


class Slurm(Section):
    """One Slurm job of all hosts, for gang.engine slurm. Keys that are null use the cluster's defaults."""

    partition: Annotated[Text | None, NOWHERE] = None
    """partitions, separated by commas"""
    account: Annotated[Text | None, NOWHERE] = None
    """account to charge"""
    qos: Annotated[Text | None, NOWHERE] = None
    """quality of service"""
    time: Annotated[Limit | None, NOWHERE] = None
    """limit of one attempt, such as 2-00:00:00; the next one resumes from a checkpoint"""
    gpus: Annotated[str, Field(pattern=r"^(--gpus-per-node=$|--gres=gpu(:[a-z0-9_.-]+)?:$|none$)"), NOWHERE] = (
        "--gpus-per-node="
    )
    """option that requests GPUs, before their number: --gpus-per-node=, --gres=gpu:, --gres=gpu:h100: or none"""
    exclusive: Annotated[bool, NOWHERE] = True
    """whole hosts, with all their processors and memory"""
    constraint: Annotated[Text | None, NOWHERE] = None
    """required features of the hosts, such as h100&ib"""
    image: Annotated[Text | None, NOWHERE] = None
    """container that pyxis starts on each host; null = none"""
    mounts: Annotated[tuple[Text, ...], NOWHERE] = Field(default=(), strict=False)
    """of the container, such as /shared:/shared; FINETUNE_RUNS must be among them"""
    options: Annotated[tuple[Option, ...], NOWHERE] = Field(default=(), strict=False)
    """further options of sbatch, such as --reservation=llm"""
    setup: Annotated[tuple[Text, ...], NOWHERE] = Field(default=(), strict=False)
    """lines that the script runs first, such as module load cuda"""
    export: Annotated[tuple[Variable, ...], NOWHERE] = Field(default=AWS, strict=False)
    """names of variables that members get from the submitting environment, also for secrets"""
    python: Annotated[Text | None, NOWHERE] = None
    """interpreter on the hosts; null = the flow's"""
    folder: Annotated[Text | None, NOWHERE] = None
    """this project's folder on the hosts; null = the flow's"""


class Kubernetes(Section):
    """One JobSet with a pod per host, for gang.engine kubernetes. Kueue admits it as a whole."""

    context: Annotated[Text | None, NOWHERE] = None
    """of kubectl's configuration; null = the current one"""
    namespace: Annotated[Name | None, NOWHERE] = None
    """null = the context's"""
    image: Annotated[Text | None, NOWHERE] = None
    """container image with this project"""
    queue: Annotated[Name | None, NOWHERE] = None
    """Kueue's LocalQueue; null = no Kueue: gangs of this project start one after another"""
    priority: Annotated[Name | None, NOWHERE] = None
    """Kueue's WorkloadPriorityClass"""
    topology: Annotated[Text | None, NOWHERE] = None
    """label of nodes, such as a rack's, that Kueue prefers to be equal for all pods"""
    gpus: Annotated[Text | None, NOWHERE] = "nvidia.com/gpu"
    """name of the GPUs' resource; null = none"""
    cpu: Annotated[Count | None, NOWHERE] = None
    """processors per pod"""
    memory: Annotated[Memory | None, NOWHERE] = None
    """of a pod, such as 1500Gi, including shm"""
    resources: Annotated[tuple[Amount, ...], NOWHERE] = Field(default=(), strict=False)
    """others per pod, such as rdma/ib=8, vpc.amazonaws.com/efa=32 or hugepages"""
    shm: Annotated[str, Field(pattern=r"^[0-9]*[1-9][0-9]*[KMGT]i$"), NOWHERE] = "64Gi"
    """size of /dev/shm, which NCCL and data loaders use; Kubernetes' default is 64 MB"""
    claim: Annotated[Name | None, NOWHERE] = None
    """PersistentVolumeClaim, ReadWriteMany, mounted at FINETUNE_RUNS"""
    selector: Annotated[tuple[Label, ...], NOWHERE] = Field(default=(), strict=False)
    """required labels of nodes, such as cloud.google.com/gke-accelerator=nvidia-h100"""
    tolerations: Annotated[tuple[Text, ...], NOWHERE] = Field(default=("nvidia.com/gpu",), strict=False)
    """taints of nodes that pods tolerate"""
    host_network: Annotated[bool, NOWHERE] = False
    """use the host's network, if RDMA adapters are not a resource of the cluster"""
    account: Annotated[Name | None, NOWHERE] = None
    """service account of the pods, for example for an S3 role"""
    secrets: Annotated[tuple[Name, ...], NOWHERE] = Field(default=(), strict=False)
    """Secrets whose keys become environment variables, such as AWS_ACCESS_KEY_ID"""
    pull_secrets: Annotated[tuple[Name, ...], NOWHERE] = Field(default=(), strict=False)
    """Secrets of the image's registry"""
    env: Annotated[tuple[Setting, ...], NOWHERE] = Field(default=(), strict=False)
    """further variables, such as NCCL_IB_HCA=mlx5; no secrets"""
    python: Annotated[Text, NOWHERE] = "python"
    """interpreter in the image"""
    folder: Annotated[Text, NOWHERE] = "/workspace/finetune"
    """this project's folder in the image"""


def contradictions(engine: str, kubernetes: Kubernetes) -> Iterator[tuple[str, str]]:
    """Yield (key, problem), as conf/schema/run.py does."""
    for key in ("image", "claim"):
        if engine == KUBERNETES and getattr(kubernetes, key) is None:
            yield f"kubernetes.{key}", f"required with gang.engine {KUBERNETES}, and missing"
    for setting in kubernetes.env:
        name = setting.partition("=")[0]
        if SECRET.search(name):
            yield "kubernetes.env", f"{name} looks like a secret: use a Secret and name it in kubernetes.secrets"
    reserved = {"cpu": "kubernetes.cpu", "memory": "kubernetes.memory", kubernetes.gpus: "layout.gpus_per_node"}
    for resource in kubernetes.resources:
        name = resource.partition("=")[0]
        if name in reserved:
            yield "kubernetes.resources", f"{name} has the key {reserved[name]}"
