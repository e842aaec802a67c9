"""Artifacts and leases, and Prefect's cache and concurrency limits: a deleted file, two at once, a killed holder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.libraries.turns import ROOT
from tests.support.flow_world import BIN, end, free_port, wait_for

CACHED = """
import sys, time
from pathlib import Path
from prefect import flow, task
from prefect.cache_policies import INPUTS
@task(cache_policy=INPUTS, persist_result=True)
def make(folder):
    with open(f"{folder}/made", "a") as file: file.write("x")
    time.sleep(5)
    Path(folder, "weights").write_text("1")
@flow
def pipeline(folder): return make(folder, return_state=True).name
print("STATE", pipeline(sys.argv[1]))
"""
SLOT = """
import sys, time
from prefect.concurrency.sync import concurrency
with concurrency("gpus", lease_duration=60):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""
LEASE = """
import sys, time
from tasks.run import lease
from tasks.store import open_store
if sys.argv[3] == "another host": lease._boot = lambda: "another"
with lease.hold(open_store(sys.argv[2]), "leases/x", lambda text: None):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def measure(folder: Path) -> None:
    with _server(folder), ThreadPoolExecutor() as pool:
        _prefect("global-concurrency-limit", "create", "gpus", "--limit", "1")
        took = {"holder killed: Prefect's slot, with its shortest lease": pool.submit(_taken_over, SLOT, [], [])}
        for where in ("this host", "another host"):
            store = folder / where
            took[f"holder killed on {where}: ours"] = pool.submit(
                _taken_over, LEASE, [store, where], [store, "this host"]
            )
        place = folder / "artifact"
        place.mkdir()
        first = _states(place)
        (place / "weights").unlink()
        print(f"  Prefect's cache: made: {first}; then its file deleted: {_states(place)}", flush=True)
        both = folder / "both"
        both.mkdir()
        states = _states(both, 2)
        made = len((both / "made").read_text())
        print(f"  Prefect's cache, two flows at once: {states}; the work was done {made} times", flush=True)
        for what, waited in took.items():
            print(f"  {what} is free after {waited.result():.0f} s", flush=True)


@contextlib.contextmanager
def _server(folder: Path):
    port = free_port()
    os.environ.update(PREFECT_HOME=str(folder / "prefect"), PREFECT_SERVER_ANALYTICS_ENABLED="false")
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    with (folder / "server.log").open("w") as log:
        command = [BIN / "prefect", "server", "start", "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: "Uvicorn running" in (folder / "server.log").read_text() or _answers(port), 300)
            yield
        finally:
            end(server)
            for name in ("PREFECT_HOME", "PREFECT_API_URL"):
                del os.environ[name]


def _answers(port: int) -> bool:
    import httpx

    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/api/health").is_success
    return False


def _prefect(*arguments: str) -> None:
    subprocess.run([BIN / "prefect", *arguments], check=True, capture_output=True)


def _start(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _taken_over(code: str, holder: list, waiter: list) -> float:
    """Return the seconds from the death of a holder until a waiting process holds the lease."""
    with _start(code, 600, *holder) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        with _start(code, 0, *waiter) as second:
            time.sleep(8)  # it waits
            first.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            assert second.stdout and second.stdout.readline() == "held\n"
            return time.monotonic() - killed


def _states(folder: Path, count: int = 1) -> str:
    flows = [_start(CACHED, folder) for _ in range(count)]
    lines = "".join(flow.communicate()[0] for flow in flows).splitlines()
    return ", ".join(line.split()[1] for line in lines if line.startswith("STATE"))
