"""tasks/run/own_server.py: the server that Prefect starts for a flow outlives the Ctrl-C that ends the flow."""

import os
import signal
import subprocess
import sys

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from contract.faults import Fault
from tasks.run import own_server

CODE = "import os, signal, sys; print(*signal.pthread_sigmask(0, []), *map(os.environ.get, sys.argv[1:]))"
MASK = [sys.executable, "-c", CODE, *own_server.LEVELS]


@pytest.fixture
def prefects():
    """Prefect's module, whose import takes seconds of each worker that only collects tests."""
    import prefect.server.api.server

    return prefect.server.api.server


@pytest.fixture
def started(prefects, monkeypatch):
    """What a process that Prefect starts there finds blocked, per start."""
    found: list[str] = []

    class Toy:
        def start(self):
            found.append(subprocess.run(MASK, capture_output=True, text=True, check=True).stdout.strip())

    monkeypatch.setattr(prefects, "SubprocessASGIServer", Toy)
    return found


def test_ctrl_c_reaches_the_flow_and_not_its_server(started):
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        own_server.start()
    assert started == [f"{signal.SIGINT.value} CRITICAL CRITICAL"]
    assert not {*own_server.LEVELS} & {*os.environ}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_standing_server_is_used_and_none_is_imported(prefects, started, monkeypatch):
    monkeypatch.delitem(sys.modules, prefects.__name__)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        own_server.start()
    assert started == [] and prefects.__name__ not in sys.modules


@pytest.mark.parametrize("named", ["http://127.0.0.1:1/api", "http://me:secret@127.0.0.1:1/api"])
def test_a_standing_server_that_is_gone_is_one_line(named):
    with temporary_settings({PREFECT_API_URL: named}), pytest.raises(Fault) as caught:
        own_server.require_answer()
    said = "PREFECT_API_URL: Failed to reach API at http://127.0.0.1:1/api/"
    assert str(caught.value) == f"{said}; unset it for a server of this run's own, or make up starts one"


def test_without_an_address_no_server_is_asked(started):
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        own_server.require_answer()
    assert not started


def test_a_server_that_does_not_start_is_a_fault_that_says_how_to_wait_longer(prefects, monkeypatch):
    class Toy:
        def start(self):
            raise RuntimeError("no port")

    monkeypatch.setattr(prefects, "SubprocessASGIServer", Toy)
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(Fault) as caught:
        own_server.start()
    assert str(caught.value) == (
        "Prefect: no port; on a busy host PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=600 (seconds) waits longer"
    )
