"""Health of a host and its GPUs before a run: versions, configuration, memory, disks, and NVML's figures of a GPU.

    of_host(run) -> dict        once per host
    of_gpu(number) -> dict      once per GPU; {} without a GPU or without nvidia-ml-py

The module only collects facts: trainer/hosts/host_verdict.py judges them. Not covered: fans, firmware, and earlier
entries of the kernel's log.
"""

import contextlib
import os
import shutil
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from conf.schema.run import Run
from contract import checksums

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "nvidia-nccl-cu13", "transformers")
BLOCK = 4 << 20
# Reasons for lower clocks that indicate a defect. The power cap (0x4) is not among them: it is normal under full load.
SLOWDOWNS = {0x8: "hardware slowdown", 0x40: "too hot (hardware)", 0x80: "power brake", 0x20: "too hot (software)"}


def of_host(run: Run, disk_bytes: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": socket.gethostname(), "node": int(os.environ.get("GROUP_RANK", "0"))}
    facts["versions"] = {name: _version(name) for name in PACKAGES}
    facts["versions"]["the trainer's code"] = checksums.of_code(ROOT, ("contract", "conf", "trainer"))
    facts["versions"]["the configuration"] = checksums.of_json(run.model_dump(mode="json"))[:12]
    facts["adapters"] = _rdma()
    facts["memory_available"] = psutil.virtual_memory().available
    with contextlib.suppress(OSError):
        facts["shm_free"] = shutil.disk_usage("/dev/shm").free
    facts["disk"] = _disk(Path(run.paths.output), disk_bytes)
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _rdma() -> dict[str, str]:
    """State of the first port of each RDMA device, such as "4: ACTIVE"."""
    states = {}
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        with contextlib.suppress(OSError):
            states[device.name] = (device / "ports/1/state").read_text().strip()
    return states


def _disk(folder: Path, size: int) -> dict[str, Any]:
    """Return the bytes/s of writing (with fsync) and reading (without the page cache) one file, and the free space."""
    path = folder / f"preflight-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(BLOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for _ in range(max(1, size // BLOCK)):
                file.write(block)
            os.fsync(file.fileno())
            written = time.monotonic()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_from = time.monotonic()
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK):
                pass
        read = time.monotonic()
        size = path.stat().st_size
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return {"folder": str(folder), "error": os.strerror(error.errno or 0)}
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return {"folder": str(folder), "write": size / (written - start), "read": size / (read - read_from), "free": free}


def of_gpu(number: int) -> dict[str, Any]:
    """Health of a GPU, by torch's number. Call it while the GPU works: an idle GPU has low clocks."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no package, no driver
        return {}
    import torch

    properties = torch.cuda.get_device_properties(number)
    facts: dict[str, Any] = {"name": properties.name, "driver": nvml.nvmlSystemGetDriverVersion()}

    def read(name: str, call, *arguments) -> None:
        with contextlib.suppress(nvml.NVMLError):  # each generation of GPUs lacks some figures
            facts[name] = call(*arguments)

    gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
    read("clock", nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM)
    read("clock_max", nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM)
    read("temperature", nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU)
    read("reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    read("ecc", nvml.nvmlDeviceGetTotalEccErrors, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    read("ecc_on", lambda: nvml.nvmlDeviceGetEccMode(gpu)[0])
    read("rows", lambda: list(nvml.nvmlDeviceGetRemappedRows(gpu)))  # corrected, uncorrected, pending, failed
    read("links", lambda: _links(nvml, gpu))
    read("pcie", lambda: [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)])
    facts["slowed"] = [reason for bit, reason in SLOWDOWNS.items() if facts.get("reasons", 0) & bit]
    return facts


def used_by_others(number: int) -> int:
    """Bytes of a GPU that other processes use. Call it while this process has nothing there except its context."""
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return total - free - torch.cuda.memory_reserved(number)


def _links(nvml, gpu) -> dict[str, int]:
    """Return the number of active NVLinks, and of all NVLinks."""
    up = count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(gpu, link)
            count += 1
        except nvml.NVMLError:
            continue
    return {"up": up, "there": count}
