"""Start or stop a Prefect server, an MLflow server and workers on this host, to try the deployments.

    python -m flows.services up          start what is not running, deploy everything, print the addresses
    python -m flows.services down        stop these services
    python -m flows.services status

`make up` and `make down` do the same. runs/services has a file with the processes, and a log of each; FINETUNE_RUNS
moves it. All services listen only on the loopback address, at ports 4200 and 5000 or the next free ones. Runs in
terminals use the same Prefect server (tasks/servers/prefect_server.py). Each wait is reported every 10 s and has a
limit.
"""

# pyright: reportOptionalMemberAccess=false

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from conf.schema.named import POOLS
from contract import closed_pipe, json_object
from contract.faults import Fault
from contract.files import write_atomically
from contract.ownership import try_lock
from contract.processes import started
from flows import arguments, packages, scheduling
from flows.arguments import refused
from flows.scheduling import Trouble
from tasks.run.places import runs_folder
from tasks.servers import prefect_server
from tasks.servers.prefect_server import HOST, SERVICES, answers
from tasks.servers.waiting import Wait, say
from tasks.store.durable import plainly

READY_WITHIN = 300.0  # MLflow makes its database at the first start; a busy host took more than 120
LEAVE_WITHIN = 20.0  # a worker that gets SIGTERM cancels its runs first
SCHEDULED_WITHIN = 45.0  # the scheduler checks new deployments every 5 s, a new worker needs 5 s
DEPLOYED_WITHIN = 900.0
OTHER_WITHIN = 1800.0  # another `make up` or `make down` of this folder
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
MARK = "FINETUNE_SERVICES"  # in the environment of all processes that `make up` starts, and of their children
BIN = Path(sys.executable).parent


@arguments.reports_faults
def main() -> int:
    try:
        return {"up": up, "down": down, "status": status}[arguments.services().parse_args().do]()
    except KeyboardInterrupt:
        return refused("interrupted; make down stops all services, and make up continues", code=130)


def up() -> int:
    say("make up: Prefect server, MLflow server, workers, deployments")
    with _turn():
        running = _running()
        workers = [f"worker-{POOLS[kind]}" for kind in ["cpu"] + ["gpu"] * Path("/dev/nvidiactl").exists()]
        if {"prefect", "mlflow", *workers} <= {*running}:
            say("already up:")
            status()
        _start_servers(running)
        prefect, mlflow = running["prefect"]["address"] + "/api", running["mlflow"]["address"]
        environment = os.environ | {"PREFECT_API_URL": prefect, "MLFLOW_TRACKING_URI": mlflow}
        environment["FINETUNE_RUNS"] = str(runs_folder())
        for pool in POOLS.values():
            if not answers(f"{prefect}/work_pools/{pool}", 30):  # edits on the server are kept
                _done(environment, str(BIN / "prefect"), "work-pool", "create", pool, "--type", "process")
        say("deployments: compared with prefect.yaml")
        print(_done(environment, sys.executable, "-m", "flows.deploy"), end="")
        for worker in workers:
            if worker not in running:
                pool = worker.partition("-")[2]
                name = f"{pool}-{socket.gethostname()}"
                command = [BIN / "prefect", "worker", "start", "--pool", pool, "--name", name]
                running[worker] = _start(worker, command, "", environment)
                _save(running)
        status()
        troubles = _troubles(running, prefect)
    print(f"\nexport PREFECT_API_URL={prefect}")
    print(f"export MLFLOW_TRACKING_URI={mlflow}")
    print(f"{os.path.relpath(BIN / 'prefect')} deployment run finetune/tiny --watch")
    for is_fatal, fact, mend in troubles:
        print(f"{'error' if is_fatal else 'warning'}: {fact}  ->  {mend}", file=sys.stderr)
    return int(any(trouble.is_fatal for trouble in troubles))


def down() -> int:
    with _turn():
        running = _running()
        server = running.pop("prefect", None)
        _end(
            {name: running.pop(name) for name in [*running] if name.startswith("worker")}
        )  # first, because workers use the servers
        _end(running)
        _end(_left())
        unused = server and prefect_server.users(server) is None
        _save({})  # Prefect's server now ends after its last user
        if server and unused:
            _end({"prefect": server})
        elif server := server or prefect_server.running():
            say(_used(server))
    return 0


def status() -> int:
    running = _running()
    for name, process in sorted(running.items()):
        say(f"{name.ljust(20)}  {process['address'] or 'running'}  (process {process['pid']})")
    if not running:
        server = prefect_server.running()
        say(_used(server) if server else "nothing is running; make up starts it")
    return 0 if running else 1


def _start_servers(running: dict) -> None:
    if "prefect" not in running:
        running["prefect"], user = prefect_server.join()
        _save(running)  # the server now stays without a user
        os.close(user)
    _wait_until_healthy("prefect", running["prefect"], "/api/health")
    with (runs_folder() / "mlflow.db.lock").open("w") as lock:  # runs create the tables too; two at once break them
        wait = Wait("MLflow's database, which a run has locked", READY_WITHIN)
        while not try_lock(lock.fileno()):
            wait.pause()
        if "mlflow" not in running:
            running["mlflow"] = _start_mlflow()
            _save(running)
        _wait_until_healthy("mlflow", running["mlflow"], "/health")


def _start_mlflow() -> dict:
    with prefect_server.free_port(5000) as free:
        port = free.getsockname()[1]
    say(f"MLflow server: starting; log: {_folder() / 'mlflow.log'}")
    runs = runs_folder()
    store = ["--backend-store-uri", f"sqlite:///{runs / 'mlflow.db'}", "--artifacts-destination"]
    place = [
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]  # each worker takes 250 MB, and four are the default
    command = [BIN / "mlflow", "server", *place, *store, str(runs / "mlflow-artifacts")]
    return _start("mlflow", command, f"http://{HOST}:{port}", {**os.environ} | QUIET)


def _wait_until_healthy(name: str, process: dict, path: str) -> None:
    wait = Wait(f"{name} server", READY_WITHIN, Path(process["log"]))
    while not answers(process["address"] + path):
        if started(process["pid"]) != process["started"]:
            raise wait.failed("has ended")
        wait.pause()


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Let one `make up` or `make down` run at a time. The kernel frees the lock when its process ends."""
    with (_folder() / "turn").open("a+") as file:
        wait = None
        while not try_lock(file.fileno()):
            if wait is None:
                file.seek(0)
                wait = Wait(f"another make up or make down (process {file.read()}) is under way", OTHER_WITHIN)
                say(wait.what)
            wait.pause()
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _troubles(running: dict, api: str) -> list[Trouble]:
    """List problems that keep schedules from running.

    Wait some seconds for the scheduler and the workers, which need time after a deployment.
    """
    own = [f"work pool {name.partition('-')[2]} " for name in running if name.startswith("worker-")]
    dead, unattended, wait = [], [], Wait("workers and schedules", SCHEDULED_WITHIN)
    try:
        deployments = scheduling.active(api)
        with contextlib.suppress(Fault):  # it is reported below
            while True:
                dead, unattended = scheduling.unscheduled(api, deployments, 0), scheduling.unattended(api, deployments)
                if not (dead or any(pool in one.fact for one in unattended for pool in own)):
                    break
                wait.pause()
    except scheduling.Silent as silent:
        dead, unattended = [Trouble(True, f"schedules: Prefect's server {silent}", "make doctor")], []
    server = running["prefect"]
    errors = scheduling.failing_services(Path(server["log"]), server["log_from"]) if "log" in server else []
    clashes = [Trouble(True, clash, "sh setup.sh") for clash in packages.clashes(packages.installed())]
    return clashes + errors + dead + unattended


def _done(environment: dict[str, str], *command: str) -> str:
    """Run a command and return its output. Raise a Fault if it fails or takes too long."""
    shown = " ".join([Path(command[0]).name, *command[1:]])
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            wait = Wait(shown, DEPLOYED_WITHIN)
            while process.poll() is None:
                wait.pause()
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        if process.returncode:
            raise Fault(f"{shown}: {output.read()}")
        return output.read()


def _start(name: str, command: list, address: str, environment: dict[str, str]) -> dict:
    marked = environment | {MARK: str(_folder())}
    return prefect_server.spawn(command, _folder() / f"{name}.log", address, marked)[1]


def _running() -> dict[str, dict]:
    """Return the recorded processes that still run. The start time is compared, because ids are reused."""
    path = _folder() / "processes.json"
    try:
        noted = json_object.read(path) if path.exists() else {}
        return {name: process for name, process in noted.items() if started(process["pid"]) == process["started"]}
    except (Fault, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, Fault) else f"{path}: damaged ({error!r})"
        raise Fault(f"{reason}; remove the file, and end the processes that make up has started by hand") from None


def _save(running: dict) -> None:
    with plainly(_folder()):
        write_atomically(_folder() / "processes.json", json.dumps(running, indent=1), durable=False)


def _end(processes: dict[str, dict]) -> None:
    """End processes and their groups, because an MLflow server has workers. Use SIGKILL if they do not end in time."""
    for process in processes.values():
        _signal(process, signal.SIGTERM)
    kill_at = time.monotonic() + LEAVE_WITHIN
    for name, process in processes.items():
        wait = Wait(f"end of {name} (process {process['pid']})", 2 * LEAVE_WITHIN)
        while started(process["pid"]) == process["started"]:
            if time.monotonic() > kill_at:
                _signal(process, signal.SIGKILL)
            wait.pause()
        say(f"stopped {name} (process {process['pid']})")


def _signal(process: dict, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if started(process["pid"]) == process["started"]:
            os.killpg(os.getpgid(process["pid"]), number)


def _left() -> dict[str, dict]:
    """Return processes that a service started and did not end, in any session: a worker may have been killed."""
    found = {}
    for process in psutil.process_iter(["environ"]):  # None for another user's
        if MARK in (process.info["environ"] or {}) and process.info["environ"][MARK] == str(_folder()):
            found[f"leftover {process.pid}"] = {"pid": process.pid, "started": started(process.pid)}
    return found


def _used(server: dict) -> str:
    users = ", ".join(map(str, prefect_server.users(server) or ()))
    end = f"ends after its users: process {users}" if users else "is ending"
    return f"{'prefect'.ljust(20)}  {server['address']}  (process {server['pid']}) {end}"


def _folder() -> Path:
    folder = runs_folder() / SERVICES
    with plainly(runs_folder()):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    closed_pipe.run(main)
