"""Owner and project of a run, the GPU hours that projects have used, and their limits.

    labels(run)              tags of the run in Prefect: owner:NAME, project:NAME
    usage(store, "2026-11")  what each project and owner has used in a month
    require_quota(...)       refuses a run whose project has no GPU hours left in this month
    gpus_of_project(...)     waits until the project may use so many GPUs at once

Each run has a note in the store (tasks/run/session.py) with its owner, its project, and the GPU hours and cost of the
stages that it made. So hosts that share a store count together. Limits are on Prefect's server: the variable
finetune_quotas, and for each project a global concurrency limit project-NAME.
"""

import contextlib
import getpass
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.variables import Variable

from conf.planner.hardware import Gpu
from conf.rules import gpus
from conf.schema.run import Run
from contract.amounts import dollars
from contract.faults import Fault, Stopped
from tasks.run.artifact import Artifact
from tasks.store import Store

QUOTAS = "finetune_quotas"  # Prefect's variable: {"PROJECT": {"gpu_hours": N, "usd": N}}; both are optional
UNITS = {"gpu_hours": "GPU hours", "usd": "USD"}
TRIED = 15.0  # seconds between two looks at whether a run that waits for GPUs of its project was stopped


@dataclass
class Usage:
    """Sum of what runs have used, by the stages that they made and not by cached ones."""

    runs: int = 0
    gpu_hours: float = 0.0
    usd: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.runs + other.runs, self.gpu_hours + other.gpu_hours, self.usd + other.usd)


@dataclass
class Spent:
    """GPU hours and cost of one run, by stage."""

    run: Run
    gpu: Gpu
    hours: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, made: Artifact) -> None:
        self.hours[stage] = hours_of(self.run, self.gpu, stage, made)

    def total(self) -> dict[str, float]:
        hours = sum(self.hours.values())
        return {"gpu_hours": hours, "usd": hours * (self.gpu.price or 0.0)}


def owner(run: Run) -> str:
    """Return the owner of a run."""
    return run.track.owner or login()


def login() -> str:
    """Return FINETUNE_OWNER, or the login name. A container's user may have no name."""
    with contextlib.suppress(OSError, KeyError):
        return os.environ.get("FINETUNE_OWNER") or getpass.getuser()
    return f"uid-{os.getuid()}"


def labels(run: Run) -> list[str]:
    return [f"owner:{owner(run)}", f"project:{run.track.project}"]


def tags(run: Run) -> dict[str, str]:
    """Tags in MLflow, whose pages show mlflow.user in the column User."""
    return {"mlflow.user": owner(run), "finetune.owner": owner(run), "finetune.project": run.track.project}


def hours_of(run: Run, gpu: Gpu, stage: str, made: Artifact) -> float:
    """Return the GPU hours of a stage. A training reports those of all its attempts."""
    if seconds := made.result.get("gpu_seconds"):
        return sum(seconds.values()) / 3600
    return made.made["seconds"] / 3600 * processes(run, gpu, stage)


def processes(run: Run, gpu: Gpu, stage: str) -> int:
    """Return the number of GPUs that a stage takes."""
    share = gpus.takes(run, stage)
    return share.of(gpu.per_host) * (1 if share.here else share.hosts)


def usage(store: Store, month: str) -> dict[tuple[str, str], Usage]:
    """Return the usage in a month (YYYY-MM, UTC), by project and owner."""
    found: dict[tuple[str, str], Usage] = defaultdict(Usage)
    for name in store.keys("runs"):
        note = json.loads((store.read(f"runs/{name}") or (b"{}",))[0])
        if note.get("project") and month_of(note["started"]) == month:
            found[note["project"], note["owner"]] += Usage(1, note.get("gpu_hours", 0.0), note.get("usd", 0.0))
    return dict(found)


def month_of(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m", time.gmtime(seconds))


def of_project(store: Store, project: str) -> Usage:
    """Return what a project has used in this month."""
    return sum((used for (name, _), used in usage(store, month_of()).items() if name == project), Usage())


def quotas() -> dict[str, dict[str, float]]:
    """Return the monthly limits of the projects that have some."""
    limits: Any = Variable.get(QUOTAS, {})
    good = isinstance(limits, dict) and all(
        isinstance(limit, dict) and {*limit} <= {*UNITS} and all(map(_is_number, limit.values()))
        for limit in limits.values()
    )
    if not good:
        raise Fault(f'Prefect\'s variable {QUOTAS}: must be like {{"PROJECT": {{"gpu_hours": 100, "usd": 500}}}}')
    return limits


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_quota(run: Run, store: Store, planned: dict[str, float]) -> None:
    """Raise a Fault if the project has used its month, or if the rest is not enough for the planned training."""
    project, limits = run.track.project, quotas().get(run.track.project)
    if not limits:
        return
    used = of_project(store, project)
    for key, name in UNITS.items():
        limit, so_far, needs = limits.get(key), getattr(used, key), planned.get(key, 0.0)
        if limit is not None and (so_far >= limit or so_far + needs > limit):
            raise Fault(
                f"project {project}: has used {dollars(so_far)} of {dollars(limit)} {name} in {month_of()} (UTC), and "
                f"the training of this run needs {dollars(needs)}; Prefect's variable {QUOTAS} has the limit"
            )


@contextlib.contextmanager
def gpus_of_project(
    project: str, count: int, holder: str, say: Callable[[str], None], stop: Callable[[], bool]
) -> Iterator[None]:
    """Hold `count` of the GPUs that the project may use at once. Without a limit on the server this does nothing."""
    name = f"project-{project}"
    with contextlib.ExitStack() as stack:
        limit = _limit(name) if count else None
        if limit is not None:
            if count > limit:
                text = f"may use {limit} GPUs at once (Prefect's limit {name}), but this stage takes {count}"
                raise Fault(f"project {project}: {text}")
            waits = False
            while True:
                with contextlib.suppress(TimeoutError):
                    stack.enter_context(concurrency(name, count, timeout_seconds=TRIED))
                    break
                if stop():
                    raise Stopped(f"{holder}: stopped while it waited for GPUs of project {project}")
                if not waits:
                    say(f"waits: project {project} may use {limit} GPUs at once, and this stage takes {count}")
                waits = True
        yield


def _limit(name: str) -> int | None:
    try:
        with get_client(sync_client=True) as client:
            found = client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        return None
    return found.limit if found.active else None
