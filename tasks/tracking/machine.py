"""One sample of this host's load, under the names of MLflow's system metrics with the prefix utilization/.

MLflow would list the prefix `system/` above all other metrics. Not covered: the other hosts of a gang.
"""

from functools import cache
from typing import Any


def sample() -> dict[str, float]:
    """Load since the previous sample. The first sample of a process has no CPU load."""
    import psutil

    memory, disk, net = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
    values = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_available_megabytes": disk.free / 1e6,
    }
    if net:
        values |= {
            "network_receive_megabytes": net.bytes_recv / 1e6,
            "network_transmit_megabytes": net.bytes_sent / 1e6,
        }
    return {f"utilization/{name}": float(value) for name, value in (values | _gpus()).items()}


def _gpus() -> dict[str, float]:
    nvml = _nvml()
    if nvml is None:
        return {}
    values = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        readings = {
            "memory_usage_megabytes": lambda gpu=gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6,
            "utilization_percentage": lambda gpu=gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "power_usage_watts": lambda gpu=gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        }
        for name, read in readings.items():
            try:
                values[f"gpu_{index}_{name}"] = read()
            except nvml.NVMLError:  # MIG devices and some virtual ones have no utilization
                continue
    return values


@cache
def _nvml() -> Any:
    """NVIDIA's NVML library, if this host has GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
