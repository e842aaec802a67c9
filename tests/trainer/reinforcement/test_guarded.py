"""Rewards by code of others: what it returns, and what it cannot do."""

import os
import socket
from pathlib import Path

import pytest

from contract.faults import Fault
from trainer.reinforcement.guarded.worker import Question, Worker

SOURCE = """
import os, signal, socket, subprocess, sys, threading, time
SEEN = []
def good(prompt, answer, reference):
    SEEN.append(answer)
    return len(answer) / 10
def raises(prompt, answer, reference):
    raise ValueError("no such\\nanswer")
def endless(prompt, answer, reference):
    while True: pass
def sleeps(prompt, answer, reference):
    time.sleep(100)
def forks(prompt, answer, reference):
    return os.fork()
def starts(prompt, answer, reference):
    return len(subprocess.run(["/bin/true"]).args)
def writes(prompt, answer, reference):
    open(answer, "w").write("x")
def appends(prompt, answer, reference):
    os.open(answer, os.O_RDWR)
def removes(prompt, answer, reference):
    os.unlink(answer)
def connects(prompt, answer, reference):
    socket.create_connection(("127.0.0.1", int(answer)))
def kills(prompt, answer, reference):
    os.kill(int(answer), 9)
def eats(prompt, answer, reference):
    return len(bytearray(1 << 34))
def leaves(prompt, answer, reference):
    os._exit(3)
def text(prompt, answer, reference):
    return "much"
def secrets(prompt, answer, reference):
    return float(any("AWS" in name or "TOKEN" in name for name in os.environ))
def threads(prompt, answer, reference):
    found = []
    thread = threading.Thread(target=lambda: found.append(1)); thread.start(); thread.join()
    return len(found)
def back(prompt, answer, reference):
    os.setuid(0)
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    made = []

    def make(name: str, seconds: float = 20.0) -> Worker:
        made.append(Worker("function", f"{tmp_path}/rewards.py:{name}", seconds, 1.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def question(answer: str = "yes", reference: str = "") -> Question:
    return Question("prompt", answer, reference)


def test_a_function_is_asked_one_answer_after_another(worker):
    assert worker("good").rewards([question("a"), question("abc")]) == [0.1, 0.3]


def test_it_may_have_threads_and_no_secrets(worker, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert worker("threads").rewards([question()]) == [1.0]
    assert worker("secrets").rewards([question()]) == [0.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ValueError: no such answer"),
        ("forks", "PermissionError"),
        ("starts", "PermissionError"),
        ("eats", "MemoryError"),
        ("leaves", "it has ended its process (code 3)"),
        ("text", "ValueError: could not convert string to float: 'much'"),
        ("back", "PermissionError"),
    ],
)
def test_what_a_function_may_not_do_ends_the_run_in_one_line(worker, name, reason):
    with pytest.raises(Fault) as fault:
        worker(name).rewards([question()])
    assert reason in str(fault.value) and "\n" not in str(fault.value)
    assert str(fault.value).startswith("reinforce.reward: function: for the answer 'yes': ")


@pytest.mark.parametrize("name", ["endless", "sleeps"])
def test_one_that_never_ends_is_ended(worker, name):
    endless = worker(name, 0.5)
    process = endless.process
    with pytest.raises(Fault, match=r"no end within 0\.5 s \(reinforce\.reward_seconds\)$"):
        endless.rewards([question()])
    assert process.returncode == -9


def test_it_changes_nothing_outside(worker, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    os.chmod(kept, 0o666)
    os.chmod(tmp_path, 0o777)
    for name, answer in (("writes", tmp_path / "new"), ("writes", kept), ("appends", kept), ("removes", kept)):
        with pytest.raises(Fault, match="PermissionError"):
            worker(name).rewards([question(str(answer))])
    with pytest.raises(Fault, match="PermissionError"):
        worker("kills").rewards([question(str(os.getpid()))])
    assert kept.read_text() == "mine" and not (tmp_path / "new").exists()


def test_it_reaches_no_network(worker):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        with pytest.raises(Fault, match="PermissionError"):
            worker("connects").rewards([question(str(server.getsockname()[1]))])
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("{}/none.py:good", r"no such file"),
        ("{}/rewards.py", r"PATH\.py:NAME is wanted"),
        ("{}/rewards.py:absent", r"NameError: absent is no function of the file"),
        ("{}/broken.py:good", r"SyntaxError"),
    ],
)
def test_a_function_that_is_none_is_told_at_once(tmp_path, function, reason):
    (tmp_path / "rewards.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def good(")
    with pytest.raises(Fault, match=f"^reinforce.function: .*{reason}"):
        Worker("function", function.format(tmp_path), 20.0, 1.0)


def test_code_is_worth_the_share_of_its_checks():
    worker = Worker("code", None, 1.0, 1.0)
    program, checks = "```python\ndef double(x):\n    return 2 * x\n```", "assert double(2) == 4\nassert double(3) == 7"
    assert worker.rewards([question(program, checks)]) == [0.5]
    harm = ["import os; os.fork()", "while True: pass", "x = (", "import os; os._exit(0)", "open('/tmp/x', 'w')"]
    assert worker.rewards([question(one, "assert True") for one in harm]) == [0.0] * 5
    assert worker.rewards([question("def double(x): return 2 * x", checks)]) == [0.5]  # in a new process
    worker.close()
    assert not Path("/tmp/x").exists()
