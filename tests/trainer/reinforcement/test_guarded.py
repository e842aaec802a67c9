"""Rewards by code of others: what it returns, and what it cannot do."""

import os
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from contract import processes
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
def several(prompt, answer, reference):
    return [1.0, 0.5]
def prints(prompt, answer, reference):
    for number in range(100000): print(number, file=sys.stderr)
    return 1
def exits(prompt, answer, reference):
    sys.exit(0)
def reads(prompt, answer, reference):
    return len(open(answer).read())
def unsaid(prompt, answer, reference):
    class Unsaid(Exception):
        def __str__(self): return 1 / 0
    raise Unsaid
def colours(prompt, answer, reference):
    raise ValueError("\\x1b[31m\\ud800")
def deaf(prompt, answer, reference):
    os.closerange(3, 1 << 16)
    time.sleep(100)
def stubborn(prompt, answer, reference):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(1)
def forges(prompt, answer, reference):
    from multiprocessing.connection import Connection
    for descriptor in range(3, 1024):
        try:
            Connection(descriptor, readable=False).send_bytes(answer.encode())
        except OSError:
            pass
    return 1
def survives(prompt, answer, reference):
    import ctypes
    return float(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))
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
    assert worker("prints").rewards([question()]) == [1.0]
    assert worker("survives").rewards([question()]) == [-1.0]  # its end with the trainer cannot be put off


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ValueError: no such answer"),
        ("forks", "PermissionError"),
        ("starts", "PermissionError"),
        ("eats", "MemoryError"),
        ("leaves", "it has ended its process (code 3)"),
        ("text", "it returned a str; it must return a number"),
        ("several", "it returned a list; it must return a number"),
        ("exits", "SystemExit: 0"),
        ("unsaid", "Unsaid"),
        ("colours", "ValueError:  [31m "),
        ("deaf", "it has ended its process"),
        ("back", "PermissionError"),
    ],
)
def test_what_a_function_may_not_do_ends_the_run_in_one_line(worker, name, reason):
    with pytest.raises(Fault) as fault:
        worker(name).rewards([question()])
    assert reason in str(fault.value) and "\n" not in str(fault.value)
    assert str(fault.value).startswith("reinforce.reward: function: for the answer 'yes': ")


@pytest.mark.parametrize("said", [f'{{"reward": 1{"0" * 400}}}', "[" * 50000, "[1]", '{"reward": null}', "\x00"])
def test_a_forged_reply_ends_the_run_in_one_line(worker, said):
    with pytest.raises(Fault, match=r"^reinforce\.reward: function: .*: its result is not a number$"):
        worker("forges").rewards([question(said)])


@pytest.mark.parametrize("name", ["endless", "sleeps", "stubborn"])
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


def test_it_reads_nothing_but_what_python_reads(tmp_path, worker, monkeypatch):
    """Neither a file that anybody may read nor the trainer's environment, also while the file is loaded."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with tempfile.NamedTemporaryFile(dir="/tmp") as anybodys:
        os.chmod(anybodys.name, 0o644)
        for path in (anybodys.name, f"/proc/{os.getpid()}/environ", "/etc/passwd", __file__):
            with pytest.raises(Fault, match="PermissionError"):
                worker("reads").rewards([question(path)])
    (tmp_path / "early.py").write_text(
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()\ndef good(**asked): pass"
    )
    with pytest.raises(Fault, match=r"^reinforce.function: good: PermissionError"):
        Worker("function", f"{tmp_path}/early.py:good", 20.0, 1.0)


def test_it_may_import_what_is_installed(tmp_path):
    text = "import numpy\ndef good(prompt, answer, reference):\n    import json.tool\n    return numpy.float32(0.5)"
    (tmp_path / "imports.py").write_text(text)
    worker = Worker("function", f"{tmp_path}/imports.py:good", 20.0, 4.0)
    assert worker.rewards([question()]) == [0.5]
    worker.close()


def test_without_landlock_it_opens_no_file(tmp_path):
    """In a process that does not become nobody, as where the trainer is not root's."""
    probe = """
import sys
from pathlib import Path
from trainer.reinforcement.guarded import rights
rights._call = lambda *arguments: -1
rights.filter_calls()
rights.hide_files(Path())
open(sys.argv[1])
"""
    said = subprocess.run([sys.executable, "-c", probe, __file__], capture_output=True, text=True)
    assert said.returncode == 1 and "PermissionError" in said.stderr


@pytest.mark.parametrize(
    "harm", ["fcntl.fcntl(0, 8, {0})", "os.sched_setaffinity({0}, [0])", "os.setpriority(0, {0}, 9)"]
)
def test_a_process_of_the_same_user_is_out_of_reach(harm):
    probe = "import fcntl, os, resource\nfrom trainer.reinforcement.guarded import rights\nrights.filter_calls()\n"
    probe += "resource.getrlimit(resource.RLIMIT_AS)\n" + harm.format(os.getpid())
    said = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, stdin=subprocess.PIPE)
    assert "PermissionError" in said.stderr.splitlines()[-1]


def test_it_ends_with_the_trainer(tmp_path):
    """However the trainer ends, and whatever the function does then."""
    (tmp_path / "rewards.py").write_text(SOURCE)
    lines = ["import sys", "from trainer.reinforcement.guarded.worker import Question, Worker"]
    lines += ["worker = Worker('function', sys.argv[1], 100.0, 1.0)", "print(worker.process.pid, flush=True)"]
    lines += ["worker.rewards([Question('', '', '')])"]
    command = [sys.executable, "-c", "\n".join(lines), f"{tmp_path}/rewards.py:endless"]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    time.sleep(0.2)
    assert processes.state(pid) in ("R", "S")
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    end = time.monotonic() + 10
    while processes.state(pid) not in ("", "Z"):
        assert time.monotonic() < end
        time.sleep(0.02)


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
        ("{}/rewards.py", r"must be PATH\.py:NAME"),
        ("{}/rewards.py:absent", r"there is no absent in it"),
        ("{}/number.py:good", r"NameError: the file has no function good"),
        ("{}/broken.py:good", r"broken\.py: no Python: .* \(line 1\)"),
    ],
)
def test_a_function_that_is_none_is_told_at_once(tmp_path, function, reason):
    (tmp_path / "rewards.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def good(")
    (tmp_path / "number.py").write_text("good = 1")
    with pytest.raises(Fault, match=f"^reinforce.function: .*{reason}"):
        Worker("function", function.format(tmp_path), 20.0, 1.0)


def test_code_is_worth_the_share_of_its_checks(tmp_path):
    worker = Worker("code", None, 1.0, 1.0)
    program, checks = "```python\ndef double(x):\n    return 2 * x\n```", "assert double(2) == 4\nassert double(3) == 7"
    assert worker.rewards([question(program, checks)]) == [0.5]
    harm = ["import os; os.fork()", "while True: pass", "x = (", "import os; os._exit(0)", f"open('{tmp_path}/x', 'w')"]
    assert worker.rewards([question(one, "assert True") for one in harm]) == [0.0] * 5
    assert worker.rewards([question("def double(x): return 2 * x", checks)]) == [0.5]  # in a new process
    cheats = [
        "import sys\nsys.modules['__main__'].code = lambda **asked: 1.0",
        "import builtins\nbuiltins.exec = print",
    ]
    assert worker.rewards([question(one, "assert False") for one in [*cheats, ""]])[2] == 0.0
    forged = "import os\nos.write(4, b'{\"reward\": NaN}'); os.write(5, b'{\"reward\": 7}'); os._exit(0)"
    assert worker.rewards([question(forged, "assert True")]) == [0.0]
    larger = forged.replace("NaN", "7").replace("7", "1" + "0" * 400)  # no float is as large
    assert worker.rewards([question(larger, "assert True")]) == [0.0]
    worker.close()
    assert not (tmp_path / "x").exists()
