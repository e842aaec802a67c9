"""Time of a call that logs a metric if no server answers: tasks/tracking/ compared with MLflow's client."""

from pathlib import Path

from benchmarks.libraries.turns import python

PATIENCE = 20  # seconds until MLflow's call is aborted here; with its default of 7 retries it takes minutes
OURS = """
import sys, time
from pathlib import Path
from tasks import tracking
own = tracking.start(Path(sys.argv[1]), "http://127.0.0.1:9", "bench", "id", "name")
own.ship()
stage = own.stage("train")
longest = 0.0
for step in range(1000):
    begun = time.perf_counter()
    stage.metrics({"loss": 1.0}, step)
    longest = max(longest, time.perf_counter() - begun)
print(f"1000 calls, the longest {longest * 1000:.1f} ms")
sys.stdout.flush()
import os; os._exit(0)
"""
THEIRS = """
import os, sys, threading, time
from mlflow import MlflowClient
client, begun = MlflowClient(tracking_uri="http://127.0.0.1:9"), time.perf_counter()
def call():
    try:
        client.log_metric("0" * 32, "loss", 1.0)
    except Exception as error:
        print(f"fails after {time.perf_counter() - begun:.1f} s: {type(error).__name__}", flush=True)
        os._exit(0)
threading.Thread(target=call, daemon=True).start()
time.sleep(float(sys.argv[1]))
print(f"one call, still waiting after {sys.argv[1]} s", flush=True)
os._exit(0)
"""


def measure(folder: Path) -> None:
    print(f"  ours: {python(OURS, folder)}", flush=True)
    print(f"  MlflowClient.log_metric: {python(THEIRS, PATIENCE)}", flush=True)
