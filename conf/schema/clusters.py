"""Sections slurm and kubernetes: what a run over several hosts asks of a cluster, where gang.engine is its name.

Nothing here is a secret: the keys hold names of environment variables and of Kubernetes' Secrets, never values. Hosts
and GPUs per host are the layout's. Not covered: Slurm's heterogeneous jobs, other schedulers of Kubernetes.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from conf.schema.bearing import NOWHERE
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

# Names that boto3's own chain knows.
AWS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
SECRET = re.compile(r"SECRET|TOKEN|PASSW|PRIVATE|CREDENTIAL|(ACCESS|API)_?KEY", re.IGNORECASE)


def listed(default: tuple[str, ...], description: str) -> Any:
    # strict=False lets a YAML list become a tuple
    return Field(default=default, strict=False, description=description)


class Slurm(Section):
    """One Slurm job of all hosts, for gang.engine slurm. Keys that are null are left to the cluster's defaults."""

    partition: Annotated[Text | None, NOWHERE] = Field(default=None, description="partitions, separated by commas")
    account: Annotated[Text | None, NOWHERE] = Field(default=None, description="who pays")
    qos: Annotated[Text | None, NOWHERE] = Field(default=None, description="quality of service")
    time: Annotated[Limit | None, NOWHERE] = Field(
        default=None, description="limit of one attempt, as 2-00:00:00; the next one goes on from its checkpoint"
    )
    gpus: Annotated[str, Field(pattern=r"^(--gpus-per-node=$|--gres=gpu(:[a-z0-9_.-]+)?:$|none$)"), NOWHERE] = Field(
        default="--gpus-per-node=",
        description="how GPUs are asked for, in front of their number: --gpus-per-node=, --gres=gpu:, --gres=gpu:h100: "
        "or none",
    )
    exclusive: Annotated[bool, NOWHERE] = Field(
        default=True, description="whole hosts, with all their processors and memory"
    )
    constraint: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="features that the hosts have, as h100&ib"
    )
    image: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="container that pyxis starts on each host; null = none"
    )
    mounts: Annotated[tuple[Text, ...], NOWHERE] = listed(
        (), "of the container, as /shared:/shared; FINETUNE_RUNS has to be among them"
    )
    options: Annotated[tuple[Option, ...], NOWHERE] = listed((), "more of sbatch's, as --reservation=llm")
    setup: Annotated[tuple[Text, ...], NOWHERE] = listed((), "lines that the script runs first, as module load cuda")
    export: Annotated[tuple[Variable, ...], NOWHERE] = listed(
        AWS, "variables that members get from whoever submits; by name, as secrets"
    )
    python: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="interpreter on the hosts; null = the one of the flow"
    )
    folder: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="this project on the hosts; null = where the flow has it"
    )


class Kubernetes(Section):
    """One JobSet with a pod per host, for gang.engine kubernetes. Kueue admits it as a whole."""

    context: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="of kubectl's configuration; null = the current one"
    )
    namespace: Annotated[Name | None, NOWHERE] = Field(default=None, description="null = the context's")
    image: Annotated[Text | None, NOWHERE] = Field(default=None, description="container image that holds this project")
    queue: Annotated[Name | None, NOWHERE] = Field(
        default=None, description="Kueue's LocalQueue; null = no Kueue: gangs of this project take turns in starting"
    )
    priority: Annotated[Name | None, NOWHERE] = Field(default=None, description="Kueue's WorkloadPriorityClass")
    topology: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="label of nodes that Kueue prefers to be equal for all pods, as a rack's"
    )
    gpus: Annotated[Text | None, NOWHERE] = Field(
        default="nvidia.com/gpu", description="resource that GPUs are; null = none"
    )
    cpu: Annotated[Count | None, NOWHERE] = Field(default=None, description="processors per pod")
    memory: Annotated[Memory | None, NOWHERE] = Field(
        default=None, description="of a pod, as 1500Gi; what is in shm counts"
    )
    resources: Annotated[tuple[Amount, ...], NOWHERE] = listed(
        (), "others per pod, as rdma/ib=8, vpc.amazonaws.com/efa=32 or hugepages"
    )
    shm: Annotated[str, Field(pattern=r"^[0-9]*[1-9][0-9]*[KMGT]i$"), NOWHERE] = Field(
        default="64Gi", description="/dev/shm, through which NCCL and data loaders go; 64 MB without"
    )
    claim: Annotated[Name | None, NOWHERE] = Field(
        default=None, description="PersistentVolumeClaim, ReadWriteMany, that is mounted where FINETUNE_RUNS is"
    )
    selector: Annotated[tuple[Label, ...], NOWHERE] = listed(
        (), "labels that nodes have, as cloud.google.com/gke-accelerator=nvidia-h100"
    )
    tolerations: Annotated[tuple[Text, ...], NOWHERE] = listed(
        ("nvidia.com/gpu",), "taints of nodes that pods may run on all the same"
    )
    host_network: Annotated[bool, NOWHERE] = Field(
        default=False, description="where RDMA adapters are no resources of their own"
    )
    account: Annotated[Name | None, NOWHERE] = Field(
        default=None, description="service account of the pods, as for an S3 role"
    )
    secrets: Annotated[tuple[Name, ...], NOWHERE] = listed(
        (), "Secrets whose keys become environment variables, as AWS_ACCESS_KEY_ID"
    )
    pull_secrets: Annotated[tuple[Name, ...], NOWHERE] = listed((), "Secrets of the image's registry")
    env: Annotated[tuple[Setting, ...], NOWHERE] = listed((), "more variables, as NCCL_IB_HCA=mlx5; no secrets")
    python: Annotated[Text, NOWHERE] = Field(default="python", description="interpreter in the image")
    folder: Annotated[Text, NOWHERE] = Field(default="/workspace/finetune", description="this project in the image")


def contradictions(engine: str, kubernetes: Kubernetes) -> Iterator[tuple[str, str]]:
    """Yield (key, problem), as conf/schema/run.py does."""
    for key in ("image", "claim"):
        if engine == "kubernetes" and getattr(kubernetes, key) is None:
            yield f"kubernetes.{key}", "required with gang.engine kubernetes, and missing"
    for setting in kubernetes.env:
        name = setting.partition("=")[0]
        if SECRET.search(name):
            yield (
                "kubernetes.env",
                f"{name} looks like a secret: put it into a Secret, and that into kubernetes.secrets",
            )
    reserved = {"cpu": "kubernetes.cpu", "memory": "kubernetes.memory", kubernetes.gpus: "layout.gpus_per_node"}
    for resource in kubernetes.resources:
        name = resource.partition("=")[0]
        if name in reserved:
            yield "kubernetes.resources", f"{name} is said by {reserved[name]}"
