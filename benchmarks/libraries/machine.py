"""Cost of a sample, and the effect of a server's absence: tasks/tracking/machine.py and MLflow's system metrics."""

from pathlib import Path

from benchmarks.libraries.turns import medians, python, show

OURS = "from tasks.tracking.machine import sample\nprint(*sorted(sample()))"
THEIRS = """
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
monitor = SystemMetricsMonitor("run", tracking_uri="http://127.0.0.1:9")
monitor.collect_metrics()
print(*sorted(f"utilization/{name}" for name in monitor.aggregate_metrics()))
"""
AWAY = """
import logging, os, sys, time
os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR="1")
logging.disable()
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
monitor = SystemMetricsMonitor("run", sampling_interval=0.2, tracking_uri="http://127.0.0.1:9")
monitor.start()
until = time.monotonic() + 15
while monitor._process.is_alive() and time.monotonic() < until:
    time.sleep(0.1)
print("has ended" if not monitor._process.is_alive() else "goes on")
"""


def measure(folder: Path) -> None:
    show(medians({"ours": lambda: python(OURS), "MLflow's": lambda: python(THEIRS)}, 3))
    ours, theirs = set(python(OURS).split()), set(python(THEIRS).split())
    print(
        f"  names in both: {len(ours & theirs)}; only ours: {sorted(ours - theirs)}; MLflow's: {sorted(theirs - ours)}"
    )
    print(f"  the server does not answer once, retries used up: MLflow's thread {python(AWAY)}; ours writes a journal")
