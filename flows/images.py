"""The code's version, and an image of it for each work pool of type kubernetes.

With `finetune deploy --image REGISTRY/finetune`, the steps `build` and `push` of prefect.yaml's definitions.image run
once for each such pool, and its deployments use the image REGISTRY/finetune:EXTRA-VERSION. Pools without GPUs get the
extra cpu. The flow is then the one that the image has installed.
"""

import asyncio
import importlib.metadata
import os
import subprocess
import sys
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.deployments.steps.core import StepExecutionError, run_steps
from prefect.exceptions import ObjectNotFound

from conf.schema.named import POOLS
from contract.faults import Fault
from contract.installation import CODE, IS_WHEEL

FOLDER = "/work"  # the folder that the image starts in
COMMIT = "FINETUNE_COMMIT"  # the image has it (deploy/image/Containerfile)


def version() -> str:
    """The commit of the code, with -dirty after changes; without git the version of the package."""
    if commit := os.environ.get(COMMIT):
        return commit
    command = ["git", "-C", str(CODE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    if not IS_WHEEL:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return importlib.metadata.version("finetune")


def build(client: SyncPrefectClient, wanted: dict[str, Any], image: str) -> None:
    """Build and push an image for each pool of type kubernetes, and let its deployments use it."""
    commit = version()
    if commit.endswith("-dirty"):
        raise Fault("--image: the image has the files of the last commit, and this checkout differs: commit first")
    built: dict[str, str] = {}
    for deployment in wanted["deployments"]:
        pool = deployment["work_pool"]["name"]
        if not _is_kubernetes(client, pool):
            continue
        if pool not in built:
            extra = "cpu" if pool == POOLS["cpu"] else "gpu"
            built[pool] = f"{image}:{extra}-{commit}"
            print(f"work pool {pool}: {built[pool]}", flush=True)
            _run(wanted["definitions"]["image"], {"EXTRA": extra, "IMAGE": built[pool]})
        variables = deployment["work_pool"].get("job_variables", {})
        deployment["work_pool"] = deployment["work_pool"] | {"job_variables": variables | {"image": built[pool]}}
        deployment["pull"] = [{"prefect.deployments.steps.set_working_directory": {"directory": FOLDER}}]
        deployment["entrypoint"] = _module(deployment["entrypoint"])
    if not built:
        raise Fault("--image: no deployment has a work pool of type kubernetes (docs/how-to/kubernetes.md)")


def _is_kubernetes(client: SyncPrefectClient, pool: str) -> bool:
    try:
        return client.read_work_pool(pool).type == "kubernetes"
    except ObjectNotFound:
        return False


def _run(steps: dict[str, Any], variables: dict[str, str]) -> None:
    os.environ.update(variables)  # steps have {{ $NAME }} for them
    try:
        asyncio.run(run_steps([*steps["build"], *steps["push"]], {}, print))
    except StepExecutionError as error:
        raise Fault(f"--image: {error.__cause__ or error}") from None
    finally:
        sys.stdout.flush()


def _module(entrypoint: str) -> str:
    """flows/finetune.py:finetune as flows.finetune:finetune, which needs no folder."""
    file, _, flow = entrypoint.partition(":")
    return f"{file.removesuffix('.py').replace('/', '.')}:{flow}"
