"""A server kept running, with a small HTTP server in place of vLLM's: what follows its end, its crash, its silence."""

import socket
import time
from pathlib import Path

import pytest

from contract.faults import Fault
from contract.served_model import KEY, ServedModel
from tasks.run import launch
from tasks.run.launch import Broken
from tasks.serving import server

ROOT = Path(__file__).parents[3]
# Answers /health as the line of `fates` says that this start has in its turn.
TOY = """
import http.server, json, os, pathlib, sys, threading, time
file = pathlib.Path(sys.argv[1])
port = json.loads(file.read_text())["port"]
fates = file.with_name("fates")
fate, *rest = fates.read_text().split()
fates.write_text(" ".join(rest))
print("serve: starting with", os.environ.get("VLLM_API_KEY", "no key"), flush=True)
print("vLLM's own line", flush=True)
if fate == "refuses":
    print("error: too large", flush=True)
    sys.exit(2)
if fate == "fails":
    sys.exit("no such kernel")
silent = threading.Event()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if silent.is_set() else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
def crash():
    time.sleep(0.6)
    os._exit(9)
if fate == "crashes":
    threading.Thread(target=crash).start()
if fate == "falls_silent":
    threading.Timer(0.6, silent.set).start()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture
def served() -> ServedModel:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ServedModel("tickets", "m", "d", "fp32", "127.0.0.1", port, "k", "s")


@pytest.fixture
def keep(served, tmp_path, monkeypatch):
    """keep(fates) -> what it said; ends once the server has answered `starts` times."""
    (tmp_path / "toy_server.py").write_text(TOY)
    monkeypatch.setattr(launch, "ROOT", f"{ROOT}:{tmp_path}")
    monkeypatch.setattr(launch, "TICK", 0.1)
    monkeypatch.setattr(server, "COMMAND", "toy_server")
    monkeypatch.setattr(server, "WAITS", (0.1, 0.1))
    monkeypatch.setattr(server, "LOOKED", 0.1)
    monkeypatch.chdir(ROOT)

    def keep(fates: str, starts: int = 1) -> list[str]:
        folder = tmp_path / "serve"
        folder.mkdir()
        (folder / "fates").write_text(fates)
        said: list[str] = []
        answers: list[float] = []
        until = time.monotonic() + 60

        def stop() -> bool:
            return len(answers) >= starts or time.monotonic() > until

        try:
            server.keep(served, folder, said.append, stop, answers.append)
        except Broken as broken:
            said.append(str(broken))
        assert time.monotonic() < until
        return said

    return keep


def test_it_serves_until_it_is_told_to_end(keep, tmp_path):
    assert keep("serves") == ["starting with no key"]
    assert "vLLM's own line" in (tmp_path / "serve/server.log").read_text()


def test_the_key_reaches_the_server_and_nothing_on_disk(keep, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "s3cr3t-marker")
    assert keep("serves") == ["starting with s3cr3t-marker"]
    assert "s3cr3t" not in (tmp_path / "serve/model.json").read_text()


def test_other_commands_do_not_get_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "s3cr3t-marker")
    monkeypatch.setattr(launch, "ROOT", f"{ROOT}:{tmp_path}")
    monkeypatch.chdir(ROOT)
    (tmp_path / "shows_key.py").write_text(f"import os; print(os.environ.get({KEY!r}))")
    said: list[str] = []
    launch.process(["shows_key"], tmp_path / "log", said.append, lambda: False)
    assert said == ["None"]


@pytest.mark.parametrize("fate, why", [("crashes", "failed with code 9"), ("falls_silent", "has not answered 3 times")])
def test_a_server_that_crashes_or_falls_silent_is_started_again(keep, fate, why):
    said = keep(f"{fate} serves", starts=2)
    assert len(said) == 3 and why in said[1] and "start 1 of 2 in a row follows" in said[1]


def test_it_is_started_again_a_bounded_number_of_times(keep):
    said = keep("crashes crashes crashes", starts=9)
    assert [line.startswith("starting") for line in said] == [True, False, True, False, True, False]
    assert "failed with code 9; the last lines of" in said[-1] and "vLLM's own line" in said[-1]


def test_a_server_that_never_answers_is_not_started_again(keep):
    said = keep("fails serves")
    assert len(said) == 2 and "no such kernel" in said[1]


def test_a_fault_of_the_callers_is_one(keep):
    with pytest.raises(Fault, match=r"^too large$"):
        keep("refuses")


def test_an_address_that_is_taken_is_refused(served):
    with socket.socket() as other:
        other.bind((served.host, served.port))
        other.listen()
        with pytest.raises(
            Fault, match=rf"^127.0.0.1 port {served.port}: Address already in use; choose another with --port$"
        ):
            server.require_free(served.host, served.port)
    server.require_free(served.host, served.port)
    with pytest.raises(Fault, match=r"^no\.such\.host\.invalid port 1: "):
        server.require_free("no.such.host.invalid", 1)


@pytest.mark.parametrize(
    "host, url", [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("gpu-1", "http://gpu-1:8000")]
)
def test_it_is_reached_from_this_host_wherever_it_listens(host, url):
    assert server.url(ServedModel("tickets", "m", "d", "fp32", host, 8000, "k", "s")) == url
