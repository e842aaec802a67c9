"""Waits for servers that accept a request and never answer, or answer one byte at a time: a line, and an end."""

import socket
import threading
import time

import pytest

from contract import waits
from contract.faults import Fault
from contract.waits import limited, within
from tasks.sources.hub import api
from tasks.store import open_store, s3_bucket
from tasks.tracking import address
from tests.support.s3_server import ENVIRONMENT


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Lines after 0.2 s."""
    monkeypatch.setattr(waits, "NOTICE", 0.2)
    monkeypatch.setattr(waits, "_noticed", {})


@pytest.fixture(params=["nothing", "a byte at a time"])
def silent(request):
    """The port of a server that accepts requests, and answers with nothing or a byte at a time."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: " if request.param != "nothing" else b"")
            while not ended.wait(0.1):
                try:
                    connection.sendall(b"x" if request.param != "nothing" else b"")
                except OSError:
                    return

    def accept() -> None:
        while not ended.is_set():
            try:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        ended.set()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attempts", [None, "2"])
def test_a_silent_store_is_named_and_given_up(silent, monkeypatch, capfd, attempts):
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent}"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_bucket, "ANSWERS", 0.6)
    monkeypatch.setattr(s3_bucket, "WHOLE", 0.8)
    monkeypatch.setattr(s3_bucket, "SILENT", 1.0)
    if attempts:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    began = time.monotonic()
    with pytest.raises(Fault, match=rf"^s3://b: http://127\.0\.0\.1:{silent} does not answer \(ReadTimeoutError\)"):
        open_store("s3://b").keys("runs")
    assert time.monotonic() - began < 15
    line = capfd.readouterr().err
    assert line.startswith(f"waiting for s3://b at http://127.0.0.1:{silent}, without an answer since ")
    assert ("AWS_MAX_ATTEMPTS" if attempts else "then the request is repeated, for 1.0 s") in line
    assert "marker" not in line


@pytest.mark.timeout(60)
def test_a_silent_hub_is_named_and_given_up(silent, monkeypatch, capfd):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(api, "ANSWERS_WITHIN", 0.5)
    monkeypatch.setattr(api, "WAITS", (0.1, 0.1))
    with pytest.raises(
        Fault, match=r"^org/name: the connection to http://127\.0\.0\.1:\d+ broke repeatedly \(ReadTimeout\)"
    ):
        api.describe("org/name", "main")
    assert f"waiting for the Hub at http://127.0.0.1:{silent}, without an answer since " in capfd.readouterr().err


@pytest.mark.timeout(60)
def test_a_silent_registry_is_named_and_given_up(silent, monkeypatch, capfd):
    monkeypatch.setattr(address, "ANSWERS_WITHIN", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(
        Fault, match=r"^MLflow at http://127\.0\.0\.1:\d+ has not answered for 1 s; check whether it runs"
    ):
        address.registry(f"http://somebody:s3cr3t@127.0.0.1:{silent}").search_registered_models()
    line = capfd.readouterr().err
    assert f"waiting for MLflow at http://127.0.0.1:{silent}, without" in line and "s3cr3t" not in line


def test_a_call_that_ends_in_time_says_nothing(capfd):
    assert within(5, lambda: 3, "somebody", "") == 3 and limited("word", 5, "somebody", "").upper() == "WORD"
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "somebody", "")
    assert capfd.readouterr().err == ""


def test_many_threads_that_wait_for_one_server_say_it_once(capfd):
    threads = [
        threading.Thread(target=lambda: within(2, lambda: time.sleep(0.5), "somebody", "then it ends"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err.count("waiting for somebody") == 1
