"""tasks/servers/prefect_server.py: one Prefect server per checkout, which ends with its last user."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from contract.faults import Fault
from contract.processes import started
from tasks.servers import prefect_server


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of runs, as on the first day."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield tmp_path


def record(home: Path, **changed: object) -> dict:
    """Note a server, as the process that starts one does."""
    noted = {"pid": os.getpid(), "started": started(os.getpid()), "address": "http://127.0.0.1:1", "log": "x"} | changed
    noted["users"] = f"{home}/runs/prefect/prefect.db.users"
    (home / "runs/prefect").mkdir(parents=True)
    (home / "runs/prefect/prefect.db.lock").write_text(json.dumps(noted))
    return noted


def test_the_running_server_is_known_by_its_number_and_start_time(home):
    assert prefect_server.running() is None
    noted = record(home)
    assert prefect_server.running() == noted


@pytest.mark.parametrize("changed", [{"started": "1"}, {"pid": 4_000_000, "started": "1"}, {"pid": "?"}])
def test_a_record_of_another_process_is_no_server(home, changed):
    record(home, **changed)
    assert prefect_server.running() is None


def test_the_kernel_knows_the_users_of_a_server(home):
    noted = record(home)
    assert prefect_server.users(noted) is None
    with Path(noted["users"]).open("w") as file:
        assert prefect_server.users(noted) is None
        fcntl.flock(file, fcntl.LOCK_SH)
        assert prefect_server.users(noted) == [os.getpid()]
    assert prefect_server.users(noted) is None


def test_no_second_server_opens_a_database_whose_server_does_not_answer(home, monkeypatch):
    """The lock decides, not the answer: a suspended server has the file open all the same."""
    monkeypatch.setattr(prefect_server, "READY_WITHIN", 0.5)
    record(home)
    with (
        (home / "runs/prefect/prefect.db.lock").open("a") as lock,
        temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 1}),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Fault, match=r"Prefect server: not ready after 1 s; its log: .*prefect.log") as caught:
            prefect_server.join(lambda _: None)
    assert "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=600 (seconds) waits longer" in str(caught.value)
    assert not (home / "runs/services").exists()


@pytest.mark.parametrize(
    ("url", "locks"),
    [
        ("postgresql+asyncpg://me:secret@db/prefect", "runs/prefect/server"),
        ("sqlite+aiosqlite:////data/mine.db?timeout=9", "/data/mine.db"),
        ("sqlite+aiosqlite:///:memory:", "runs/prefect/server"),
    ],
)
def test_a_database_that_the_user_names_is_used(home, url, locks):
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: url}):
        assert prefect_server._database() == home / locks
        environment = prefect_server._environment(home / locks, "http://127.0.0.1:4200")
    assert environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == url
    assert environment["PREFECT_UI_API_URL"] == "http://127.0.0.1:4200/api"


def test_without_one_it_lies_in_runs_and_an_address_of_the_caller_is_not_passed_on(home, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    environment = prefect_server._environment(prefect_server._database(), "http://127.0.0.1:4200")
    assert (
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == f"sqlite+aiosqlite:///{home}/runs/prefect/prefect.db"
    )
    assert "PREFECT_API_URL" not in environment and environment["PREFECT_HOME"] == f"{home}/runs/prefect"
    monkeypatch.setenv("PREFECT_HOME", str(home / "elsewhere"))
    assert prefect_server._database() == home / "elsewhere/prefect.db"


@pytest.mark.parametrize("named", ["http://127.0.0.1:1/api", "http://me:secret@127.0.0.1:1/api"])
def test_a_server_that_is_named_and_gone_is_one_line(home, named):
    with temporary_settings({PREFECT_API_URL: named}), pytest.raises(Fault) as caught:
        prefect_server.use()
    said = "PREFECT_API_URL: Failed to reach API at http://127.0.0.1:1/api/"
    assert str(caught.value) == f"{said}; unset it for the server of this checkout"


def test_a_command_that_starts_no_server_finds_none(home):
    prefect_server.use_running()
    assert not (home / "runs").exists()


def test_a_server_that_does_not_start_is_a_fault_with_its_log(home, monkeypatch):
    (home / "tasks").mkdir()
    (home / "tasks/__init__.py").touch()  # hides the package that the server's module is in
    monkeypatch.setattr(prefect_server.installation, "FILES", home)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(Fault, match=r"Prefect server: ended with code 1; its log: .*/prefect.log; .*Error"):
        prefect_server.join(lambda _: None)
