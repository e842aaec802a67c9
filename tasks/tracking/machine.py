"""One sample of this host's load, under the names of MLflow's system metrics with the prefix utilization/.

MLflow would list the prefix `system/` above all other metrics. Other hosts of a gang are not sampled.
"""

import contextlib
import logging
from functools import cache
from typing import Any


def sample() -> dict[str, float]:
    """Return the load since the previous sample. The first sample of a process has no CPU load."""
    values: dict[str, float] = {}
    for monitor in _monitors():
        monitor.clear_metrics()
        monitor.collect_metrics()
        values |= monitor.aggregate_metrics()
    return {f"utilization/{name}": float(value) for name, value in values.items()}


@cache
def _monitors() -> list[Any]:
    """Return MLflow's monitors for CPUs, disk, network and NVIDIA GPUs that this host has."""
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor, network_monitor

    # Hides an error about MIG devices, which have no utilization, in each sample.
    logging.getLogger(gpu_monitor.__name__).setLevel(logging.ERROR)
    monitors: list[Any] = [cpu_monitor.CPUMonitor(), disk_monitor.DiskMonitor()]
    with contextlib.suppress(AttributeError):  # without a network
        monitors.append(network_monitor.NetworkMonitor())
    with contextlib.suppress(ImportError, RuntimeError):  # without a GPU
        monitors.append(gpu_monitor.GPUMonitor())
    return monitors
