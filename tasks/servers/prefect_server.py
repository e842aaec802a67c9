"""Prefect server that a command uses: one per checkout, shared by all commands.

PREFECT_API_URL names it, in the environment or in a profile. Otherwise it is the server that has this checkout's
database open, from `make up` or from another command. Otherwise this command starts one
(tasks/servers/prefect_process.py), which ends after its last user.

The database is runs/prefect/prefect.db, or prefect.db in PREFECT_HOME, or that of Prefect's setting of a connection
URL. Two files next to it carry file locks, which the kernel releases when their holders end, even by SIGKILL:

    prefect.db.lock     held by the server; it contains its address and process: no second server opens the database
    prefect.db.users    shared by the commands that use the server
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract import installation, json_object
from contract.faults import Fault
from contract.ownership import try_lock
from contract.processes import started
from tasks.run.places import runs_folder
from tasks.servers.waiting import Wait, say
from tasks.store.durable import plainly

HOST = "127.0.0.1"
PORT = 4200  # or the next free port
READY_WITHIN = 300.0  # seconds; the first start creates the database, which took more than 120 s on a busy host
LIMIT = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"  # used if it is longer
SERVICES = "services"  # folder in runs/ of the servers' logs, and of the list that `make up` keeps
# The scheduler sees a new schedule in its next round. With Prefect's 60 s between rounds, a yearly cron that is due
# within a minute would first run in a year. Requests that fail because the database is locked are logged as errors.
SETTINGS = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5", "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true"}


def use() -> None:
    """Connect this process's Prefect to the right server, as one of its users until the process ends.

    Raises a Fault if the server of PREFECT_API_URL does not answer, or if a new server does not start.
    """
    if _settings().api.url:
        _require_answer()
    else:
        _use_server_of_checkout()


def use_running() -> None:
    """Connect to a running server of this checkout. Without a running server, do nothing."""
    if not _settings().api.url and running():
        _use_server_of_checkout()


def _use_server_of_checkout() -> None:
    from prefect.context import refresh_global_settings_context

    server, _ = join(lambda line: print(line, file=sys.stderr, flush=True))
    os.environ["PREFECT_API_URL"] = f"{server['address']}/api"
    refresh_global_settings_context()


def join(say: Callable[[str], None] = say) -> tuple[dict, int]:
    """Become a user of the checkout's server, and start it if necessary.

    Returns the server's record and a file descriptor: while it is open, the server keeps running.
    """
    limit = max(READY_WITHIN, _settings().server.ephemeral.startup_timeout_seconds)
    database = _database()
    with plainly(database.parent):
        database.parent.mkdir(parents=True, exist_ok=True)
        user = os.open(_lock_file(database, "users"), os.O_RDWR | os.O_CREAT, 0o600)
    log = runs_folder() / SERVICES / "prefect.log"
    is_new = "" if database.exists() else ", which creates its database first"
    wait = Wait("Prefect server", limit, log, say)
    while not try_lock(user, shared=True):  # a server without users is ending
        wait.pause()
    process = None
    while True:
        if process is None and (process := _start(database, log)):
            say(f"Prefect server: starts{is_new}; its log: {log}")
        server = running()
        if server and answers(f"{server['address']}/api/health"):
            return server, user
        if process and process.poll() is not None:
            raise wait.failed(f"ended with code {process.returncode}")
        try:
            wait.pause()
        except Fault as fault:
            raise Fault(f"{fault}; on a busy host {LIMIT}=600 (seconds) waits longer") from None


def running() -> dict | None:
    """Return the record of the server that has this checkout's database open; None without a server."""
    record = json_object.read_or_empty(_lock_file(_database(), "lock"))
    return record if record and started(record["pid"]) == record["started"] else None


def users(server: dict) -> list[int] | None:
    """Return the processes that use the server, as the kernel lists them; None if no process uses it."""
    try:
        file = os.open(server.get("users", ""), os.O_RDWR)  # the record of an earlier version has no such file
    except OSError:
        return None
    try:
        if try_lock(file):
            return None
        number = str(os.fstat(file).st_ino)
    finally:
        os.close(file)
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sorted({int(lock[4]) for lock in locks if lock[3] == "READ" and lock[5].rpartition(":")[2] == number})


def answers(url: str, seconds: float = 2) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds):
            return True
    except (OSError, http.client.HTTPException):
        return False


def free_port(first: int) -> socket.socket:
    """Return a socket at the first free port of the loopback address."""
    for port in range(first, first + 100):
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listening.bind((HOST, port))
            return listening
        listening.close()
    raise Fault(f"no free port from {first} to {first + 99}")


def _start(database: Path, log: Path) -> subprocess.Popen | None:
    """Start the server, which inherits the lock of the database. Return None if another process has the lock."""
    lock = os.open(_lock_file(database, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(lock):
            return None
        with plainly(log.parent):
            log.parent.mkdir(parents=True, exist_ok=True)
        with free_port(PORT) as listening:
            listening.listen(128)
            address, users = f"http://{HOST}:{listening.getsockname()[1]}", str(_lock_file(database, "users"))
            inherited = [lock, listening.fileno()]
            command = [sys.executable, "-m", "tasks.servers.prefect_process", *map(str, inherited)]
            command += [users, str(log.parent / "processes.json")]
            environment, folder = _environment(database, address), installation.FILES  # with Prefect's prefect.toml
            process, record = spawn(command, log, address, environment, cwd=folder, pass_fds=inherited)
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(record | {"users": users}).encode(), 0)
        return process
    finally:
        os.close(lock)


def spawn(
    command: list, log: Path, address: str, environment: dict[str, str], **options: Any
) -> tuple[subprocess.Popen, dict]:
    """Start a service in a separate session. Its record has its process, its address, and where its log begins."""
    with log.open("a") as output:
        begin, null = output.tell(), subprocess.DEVNULL
        to_log = {"stdin": null, "stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, env=environment, **to_log, **options)
    place = {"address": address, "log": str(log), "log_from": begin}
    return process, {"pid": process.pid, "started": started(process.pid)} | place


def _environment(database: Path, address: str) -> dict[str, str]:
    """Return the server's environment, with the settings of the caller's profile and the address of its API."""
    settings = _settings().to_environment_variables(exclude_unset=True)
    settings |= {"PREFECT_HOME": str(database.parent), "PREFECT_UI_API_URL": f"{address}/api"}
    if not _connection_url():
        settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{database}"
    return {name: value for name, value in (SETTINGS | os.environ | settings).items() if name != "PREFECT_API_URL"}


def _database() -> Path:
    """Return the path of the database's file. For PostgreSQL, only the locks use this path."""
    home = Path(os.environ.get("PREFECT_HOME") or runs_folder() / "prefect").expanduser().absolute()
    kind, _, path = _connection_url().partition(":///")
    if kind.startswith("sqlite") and path and ":memory:" not in path:
        return Path(path.partition("?")[0]).absolute()
    return home / ("prefect.db" if not kind else "server")


def _connection_url() -> str:
    """Return the user's connection URL for Prefect's server; "" if none is set."""
    database = _settings().server.database
    url = database.connection_url if "connection_url" in database.model_fields_set else None
    return url.get_secret_value() if url else ""


def _settings() -> Any:
    from prefect.settings import get_current_settings

    return get_current_settings()


def _lock_file(database: Path, what: str) -> Path:
    return database.with_name(f"{database.name}.{what}")


def _require_answer() -> None:
    """Raise a Fault if the server of PREFECT_API_URL does not answer, or has an incompatible version."""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch_once()  # the flow's check is then skipped
    except (RuntimeError, httpx.HTTPError) as error:
        line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise Fault(f"PREFECT_API_URL: {line}; unset it for the server of this checkout") from None
