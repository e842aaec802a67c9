"""Check this host: one line for each requirement, and a command that fixes each problem.

    python -m flows.doctor [--extra cpu|gpu] [--json]

It needs only Python 3.8 and the standard library, because packages may be missing. Versions come from the packages'
metadata: importing torch alone would take seconds. Addresses of servers are named by their variable and never printed,
because a URL can contain a password. Exit code 1: a check failed. A host without a GPU passes: runs then use the CPU.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from conf.host import gpu_locks, nvidia_smi
from contract import closed_pipe, installation
from contract.faults import Fault
from contract.installation import runs_folder
from contract.processes import memory_files
from flows import arguments, scheduling
from flows.packages import clashes, installed, locked

GB = 10**9
DRIVERS = {"12": 525, "13": 580}  # NVIDIA's first driver for each major version of CUDA
CUDA = "13"  # of uv.lock's torch
GLIBC = (2, 31)  # wheels of uv.lock: Ubuntu 20.04, Debian 11 and RHEL 9 have it
PROBE_SECONDS = 3
CREDENTIALS = re.compile(
    "AWS_(ACCESS_KEY_ID|PROFILE|WEB_IDENTITY_TOKEN_FILE|CONTAINER_CREDENTIALS_(FULL|RELATIVE)_URI)"
)


class Finding(NamedTuple):
    status: str  # ok; info: a fact, nothing to change; warn; fail
    name: str
    fact: str
    mend: str = ""


def packages(have: dict[str, str], extra: str) -> Finding:
    import tomllib  # imported here: an older Python lacks it, and must reach the check of its version

    lock = installation.CODE / "uv.lock"
    if not lock.exists():
        return Finding("info", "packages", "a wheel has no uv.lock to compare packages with", "")
    want = locked(tomllib.loads(lock.read_text()), extra)
    pairs = ((name, have.get(name, "missing"), version) for name, version in sorted(want.items()))
    lacks = [f"{name} is {present} (locked: {version})" for name, present, version in pairs if present != version]
    if lacks:
        shown = ", ".join(lacks[:5]) + (", ..." if len(lacks) > 5 else "")
        return Finding("fail", "packages", f"{len(lacks)} of {len(want)}: {shown}", f"make setup EXTRA={extra}")
    return Finding("ok", "packages", f"{len(want)} as in uv.lock, extra {extra}")


def torch(have: dict[str, str]) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("fail", "torch", "cannot be imported", "make setup")
    names = ("torch", "nvidia-cuda-runtime", "nvidia-nccl-cu13")
    return Finding("ok", "torch", ", ".join(f"{name} {have.get(name, 'missing')}" for name in names))


def system(machine: os.uname_result, libc: str) -> Finding:
    """Check the system, the processor and the C library, which no package can install."""
    fact = f"{machine.sysname} {machine.machine}, {libc or 'no glibc'}"
    wanted = f"{'.'.join(map(str, GLIBC))}"
    if (machine.sysname, machine.machine) != ("Linux", "x86_64"):
        return Finding("fail", "system", f"{fact}; the packages are for Linux on x86_64", "another host")
    name, _, version = libc.partition(" ")
    if name != "glibc" or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < GLIBC:
        mend = "docker run ubuntu:24.04  # or a host of Ubuntu 20.04, Debian 11, RHEL 9 or newer"
        return Finding("fail", "system", f"{fact}; the packages need glibc {wanted} or newer", mend)
    return Finding("ok", "system", fact)


def environment(extra: str) -> list[Finding]:
    version = "{}.{}.{}".format(*sys.version_info[:3])
    if sys.version_info[:2] != (3, 12):
        return [Finding("fail", "python", f"{version}, the packages need 3.12", f"make setup EXTRA={extra}")]
    have = installed()
    bad = [Finding("fail", "packages", clash, f"EXTRA={extra} sh setup.sh") for clash in clashes(have)]
    return [Finding("ok", "python", version), packages(have, extra), *bad, torch(have)]


def query_gpus() -> tuple[list[list[str]], str]:
    """Return name, memory in MiB and driver version of each GPU, and the error if GPUs cannot be listed (else "")."""
    query = "--query-gpu=name,memory.total,driver_version"
    text, trouble = nvidia_smi.answer(query, "--format=csv,noheader,nounits")
    return [line.split(", ") for line in text.splitlines()], trouble


def gpus(cards: list[list[str]], trouble: str) -> Finding:
    if trouble:
        return Finding("warn", "gpu", f"{trouble}: training runs on the CPU over gloo", "sudo modprobe nvidia")
    if not cards:
        return Finding("info", "gpu", "no GPU: training runs on the CPU over gloo")
    name, memory, driver = cards[0]
    fact = f"{len(cards)} x {name}, {memory} MiB each, driver {driver}"
    cuda = installed().get("nvidia-cuda-runtime", CUDA).split(".")[0]
    least = DRIVERS.get(cuda, DRIVERS[CUDA])
    if int(driver.split(".")[0]) < least:
        mend = f"sudo apt-get install nvidia-driver-{least}-server && sudo reboot  # docs/how-to/gpu.md"
        needs = f"torch is built for CUDA {cuda}, and CUDA {cuda} needs {least} or newer"
        return Finding("fail", "gpu", f"{fact}; {needs}", mend)
    return Finding("ok", "gpu", f"{fact}, new enough for CUDA {cuda}")


def owners() -> list[Finding]:
    """Return the owners of the GPUs and the processes that wait for GPUs."""
    try:
        return [Finding("info", "gpu", line) for line in gpu_locks.standing()]
    except Fault as fault:
        return [Finding("fail", "gpu", str(fault), f"sudo chmod 1777 {gpu_locks.folder()}")]


def network(on_gpu: bool, root: Path = Path("/")) -> Finding:
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        return Finding("info", "network", "no RDMA" + (": several hosts would train over TCP" if on_gpu else ""))
    efa = sum((device / "device/driver").resolve().name == "efa" for device in devices)
    fact = f"{len(devices)} RDMA devices, {efa} of them EFA"
    if not (root / "dev/infiniband").is_dir():
        mend = "docker run --device=/dev/infiniband --ulimit memlock=-1"
        return Finding("warn", "network", f"{fact}, not passed to this container", mend)
    if efa and not any((root / "opt/amazon").glob("ofi-nccl/lib*/**/libnccl-net*.so")):
        return Finding("warn", "network", f"{fact}, without NCCL's plugin for it", "sudo ./efa_installer.sh -y")
    pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if pinned != resource.RLIM_INFINITY:
        return Finding("warn", "network", f"{fact}, but only {pinned // 1024} KiB may be pinned", "ulimit -l unlimited")
    return Finding("ok", "network", fact)


def existing(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def writable(name: str, folder: Path) -> Finding:
    there = existing(folder)
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Finding("fail", name, f"cannot write to {there}", f'sudo chown -R "$USER" {there}')
    return Finding("ok", name, f"{folder}")


def disk(name: str, folder: Path, on_gpu: bool) -> Finding:
    finding = writable(name, folder)
    need = (1000 if on_gpu else 10) * GB  # 355B parameters in bf16 are 0.7 TB
    free = shutil.disk_usage(existing(folder)).free
    if finding.status == "ok" and free < need:
        mend = f"du -xh -d 2 {existing(folder)} | sort -h | tail"
        return Finding("warn", name, f"{free // GB} GB free for {folder}, {need // GB} GB needed", mend)
    return finding._replace(fact=f"{finding.fact}, {free // GB} GB free")


def memory_limit(root: Path = Path("/")) -> float:
    """Return the lowest memory limit, in bytes, of this process's control group (version 1 or 2) and its parents."""
    limits = [float("inf")]
    for files in memory_files("memory.max", "memory.limit_in_bytes", root):
        limits += [float(file.read_text().replace("max", "inf")) for file in files]
    return min(limits)


def memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit()
    fact = f"{min(total, limit) / GB:.0f} GB" + (" (control group)" if limit < total else "")
    fact += f", {len(os.sched_getaffinity(0))} CPUs"
    if min(total, limit) < 8 * GB:
        return Finding("warn", "memory", f"{fact}; the tests need 8 GB", "docker run --memory=16g")
    return Finding("ok", "memory", fact)


def shared_memory(on_gpu: bool) -> Finding:
    size = shutil.disk_usage("/dev/shm").total
    if size < GB:  # docker's default is 64 MB, with which data loaders and NCCL end with a bus error
        status = "fail" if on_gpu else "warn"
        return Finding(status, "shm", f"/dev/shm holds {size // 10**6} MB, 1 GB needed", "docker run --shm-size=16g")
    return Finding("ok", "shm", f"/dev/shm holds {size // GB} GB")


def open_files() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < 8192:  # checkpoint shards, sockets between ranks, tensors from data loaders
        return Finding("warn", "files", f"{soft} may be open at once, 8192 needed", "ulimit -n 8192")
    return Finding("ok", "files", f"{soft} may be open at once")


def probe(url: str, method: str = "GET") -> int | str:
    """Return the HTTP status of an endpoint, or the reason why it did not answer.

    The text of an exception may quote the URL and is not returned.
    """
    answer: list[int | str] = [f"no answer in {PROBE_SECONDS} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(scheduling.request_to(url, method), timeout=PROBE_SECONDS) as response:
                answer[0] = response.status
        except urllib.error.HTTPError as error:
            answer[0] = error.code
        except TimeoutError:
            pass  # keep the default answer; from Python 3.10 on, the socket's time limit ends before the thread's
        except urllib.error.URLError as error:
            answer[0] = getattr(error.reason, "strerror", None) or type(error.reason).__name__
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer[0] = "not a URL" if isinstance(error, (ValueError, http.client.InvalidURL)) else type(error).__name__

    # In a thread, because a lookup at a dead name server takes longer than the socket's time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answer[0]


def service(name: str, variable: str, default: str) -> Finding:
    """Check a server that reports its state at /health."""
    url = os.environ.get(variable)
    if not url:
        return Finding("ok", name, default)
    answer = probe(url.rstrip("/") + "/health")
    if answer == 200:
        return Finding("ok", name, f"the server at {variable} is healthy")
    status = "warn" if isinstance(answer, int) and answer < 500 else "fail"  # such as 401: no outage
    return Finding(status, name, f"the server at {variable}: {answer}", f"unset {variable}  # then {default}")


def schedules(prefect: Finding) -> list[Finding]:
    """Check that the server at PREFECT_API_URL, or else the server of make up, starts scheduled runs."""
    up = scheduling.of_make_up(runs_folder())
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/") or (up["address"] + "/api" if up else "")
    if prefect.status != "ok" or not api:
        return [Finding("info", "schedule", "no server answers, so no schedule runs")]
    deployments = []
    troubles = scheduling.failing_services(Path(up["log"]), up["log_from"]) if up and "log" in up else []
    try:
        deployments = scheduling.active(api)
        troubles += scheduling.unscheduled(api, deployments) + scheduling.unattended(api, deployments)
        troubles += scheduling.untaken(api)
    except scheduling.Silent as silent:
        troubles.append(scheduling.Trouble(False, f"not checked: the server {silent}", "prefect version"))
    if not troubles:
        count = sum(len(deployment["schedules"]) for deployment in deployments)
        return [Finding("ok", "schedule", f"{count} active, each with a next run and a worker")]
    return [Finding("fail" if is_fatal else "warn", "schedule", fact, mend) for is_fatal, fact, mend in troubles]


def tracking() -> Finding:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    scheme = uri.partition(":")[0]
    if scheme == "sqlite":
        return writable("tracking", Path(uri[len("sqlite:///") :]).parent)
    if scheme in ("", "http", "https"):
        return service("tracking", "MLFLOW_TRACKING_URI", "a local sqlite file")
    return Finding("info", "tracking", "MLFLOW_TRACKING_URI is neither http nor sqlite; not checked")


def store() -> Finding:
    place = os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store")
    if not place.startswith("s3://"):
        is_uri = place.startswith("file://")
        return writable("store", Path(place[len("file://") :] if is_uri else os.path.expanduser(place)))
    endpoint = next(filter(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")), "")
    answer = probe(os.environ.get(endpoint, "https://s3.amazonaws.com"), "HEAD")
    fact = f"S3 at {endpoint or 'AWS'}: "
    if isinstance(answer, str):
        return Finding("fail", "store", fact + answer, "unset FINETUNE_STORE  # then runs/store")
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config")
    if any(map(CREDENTIALS.fullmatch, os.environ)) or any(os.path.exists(os.path.expanduser(file)) for file in files):
        return Finding("ok", "store", fact + "answers, credentials exist")
    return Finding("warn", "store", fact + "answers; no credentials, unless the instance has a role", "aws configure")


def hub(cache: Path) -> Finding:
    where = "the mirror in HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else "huggingface.co"
    if os.environ.get("HF_TOKEN") or (cache / "token").is_file():
        return Finding("ok", "hub", f"{where}, with a token")
    return Finding("warn", "hub", f"{where}, without a token: gated models cannot be downloaded", "hf auth login")


def diagnose(extra: str | None) -> tuple[str, list[Finding]]:
    """Return the kind of this host, cpu or gpu, and all findings."""
    cards, trouble = query_gpus()
    on_gpu = bool(cards)
    host = "gpu" if on_gpu else "cpu"
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    prefect = service("prefect", "PREFECT_API_URL", "a server for all runs of this folder, until the last ends")
    return host, [
        system(os.uname(), " ".join(filter(None, platform.libc_ver()))),
        *environment(extra or host),
        gpus(cards, trouble),
        *owners(),
        network(on_gpu),
        memory(),
        shared_memory(on_gpu),
        open_files(),
        disk("runs", runs_folder(), on_gpu),
        disk("cache", cache, on_gpu),
        store(),
        tracking(),
        prefect,
        *schedules(prefect),
        hub(cache),
    ]


@arguments.reports_faults
def main() -> int:
    options = arguments.doctor().parse_args()
    host, findings = diagnose(options.extra)
    failures = sum(finding.status == "fail" for finding in findings)
    if options.json:
        shown = [finding._asdict() for finding in findings]
        print(json.dumps({"host": host, "green": not failures, "findings": shown}))
        return bool(failures)
    for finding in findings:
        print(f"{finding.status:<4}  {finding.name:<8}  {finding.fact}" + f"  ->  {finding.mend}" * bool(finding.mend))
    print(f"not ready for {host.upper()} runs: {failures} to fix" if failures else f"green for {host.upper()} runs")
    return bool(failures)


if __name__ == "__main__":
    closed_pipe.run(main)
