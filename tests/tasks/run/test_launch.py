"""tasks/run/launch.py, with small modules in place of a trainer's."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from contract.faults import Fault, Stopped
from tasks.run import launch
from tasks.run.launch import Broken
from tasks.stages.run_job import run_job

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Starts python code as a module, and returns the lines that it said."""
    monkeypatch.setattr(launch, "ROOT", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(code: str, stop=lambda: False, tick=lambda: None, say=None) -> list[str]:
        (tmp_path / "toy.py").write_text(code)
        said: list[str] = []
        monkeypatch.chdir(ROOT)
        launch.process(["toy", "argument"], tmp_path / "toy.log", say or said.append, stop, tick, grace=0.5)
        return said

    return run


def test_lines_are_said_and_logged_as_they_are(run, tmp_path):
    assert run("import sys; print(sys.argv[1]); print(); print('  ä', end='')") == ["argument", "", "  ä"]
    assert run("print('again')") == ["again"]
    assert (tmp_path / "toy.log").read_text() == "argument\n\n  ä\nagain\n"


def test_what_is_private_stays_here_unless_the_command_needs_it(run, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "x")
    code = "import os; print(*sorted(name for name in os.environ if name.startswith(('HF_', 'AWS_'))))"
    (found,) = run(code)
    assert "HF_ENDPOINT" in found and not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & {*found.split()}
    said: list[str] = []
    launch.process(["toy"], tmp_path / "toy.log", said.append, lambda: False, keep=("HF_TOKEN",))
    assert "HF_TOKEN" in said[0].split() and "AWS_SECRET_ACCESS_KEY" not in said[0]


def test_a_fault_passes_through(run):
    with pytest.raises(Fault) as caught:
        run("import sys; print('starting'); print('error: layout.tp: 3', file=sys.stderr); sys.exit(2)")
    assert str(caught.value) == "layout.tp: 3"


def test_code_2_without_such_a_line_shows_what_there_is(run, tmp_path):
    with pytest.raises(Fault, match=r"^usage: toy$"):
        run("import sys; print('usage: toy'); sys.exit(2)")
    with pytest.raises(Fault, match=r"toy ended with code 2 and without a message; see .*toy\.log"):
        run("import sys; sys.exit(2)")


def test_a_failure_shows_the_last_lines_and_names_the_log(run, tmp_path):
    with pytest.raises(Broken) as caught:
        run("for i in range(100): print('line', i)\nraise KeyError('x')")
    text = str(caught.value)
    assert "toy failed with code 1" in text and str(tmp_path / "toy.log") in text
    assert "line 99\n" in text and "line 70\n" not in text and text.endswith("KeyError: 'x'")


def test_killed_by_the_kernel(run):
    with pytest.raises(Broken, match="failed with code 137"):
        run("import os; os.kill(os.getpid(), 9)")


def test_stopped_ends_it_in_time(run):
    began = time.monotonic()
    with pytest.raises(Stopped):
        run("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", lambda: True)
    assert time.monotonic() - began < 3


def test_stopped_while_it_floods(run):
    began = time.monotonic()
    with pytest.raises(Stopped):
        run("while True: print('x' * 100)", lambda: time.monotonic() - began > 0.5)
    assert time.monotonic() - began < 4


def test_what_fails_here_ends_it_too(run):
    def full(line):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run("import os, time; print(os.getpid(), flush=True); time.sleep(60)", say=full)


def test_private_variables_stay_here(run, monkeypatch):
    secrets = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY"]
    secrets += ["MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]
    for name in secrets:
        monkeypatch.setenv(name, "the-marker")
    monkeypatch.setenv("OTHER", "stays")
    told = run("import os\nfor item in os.environ.items(): print(*item)\n"
               "print(open(f'/proc/{os.getppid()}/environ').read())")  # fmt: skip
    assert "OTHER stays" in told
    assert "the-marker" not in "\n".join(told)


def test_what_is_no_utf_8_is_shown_as_such(run, tmp_path):
    code = r"import os; os.write(1, b'gr\xfcn \xf0\x9f\x98\x80 \xf0\x9f\n\xff\xfe\r\n')"
    assert run(code) == ["gr�n 😀 �", "��"]


def test_a_million_lines_do_not_grow_memory(run, tmp_path):
    count, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def slow(line):
        nonlocal count
        count += 1
        if count % 100_000 == 0:
            time.sleep(0.1)  # the command is faster than who reads it

    run("import sys\nfor _ in range(100): sys.stdout.write('0123456789abcdef\\n' * 10_000)", say=slow)
    assert count == 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB


def test_a_line_without_an_end_is_cut(run):
    said = run("import sys\nfor _ in range(50): sys.stdout.write('=' * 10_000)\nprint('!')")
    assert "".join(said) == "=" * 500_000 + "!"
    assert max(map(len, said)) < 100_000


@pytest.mark.parametrize("code", ["time.sleep(2)", "for _ in range(200): print(); time.sleep(0.01)"])
def test_it_ticks_twice_a_second_whatever_is_printed(run, code):
    ticks, began = [], time.monotonic()
    run(f"import time\n{code}", tick=lambda: ticks.append(1))
    assert 4 <= len(ticks) <= 2 * (time.monotonic() - began) + 2  # at once, and when it is over


def test_what_outlives_a_killed_guard_does_not_hold_us(run, tmp_path):
    """The guard was killed from outside; a process that it could not end keeps the pipe open."""
    code = "import os, signal, subprocess, sys; subprocess.Popen(['sleep', '6'], start_new_session=True)\n"
    began = time.monotonic()
    with pytest.raises(Broken, match="code -9"):
        run(code + "print('up', flush=True); os.kill(os.getppid(), signal.SIGKILL); signal.pause()")
    assert time.monotonic() - began < 5


def test_nothing_is_left_open(run):
    before = len(os.listdir("/proc/self/fd"))
    run("print('x')")
    with pytest.raises(Broken):
        run("raise SystemExit(3)")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_trainer_gets_its_whole_configuration(tmp_path, monkeypatch):
    """The real guard and the real loader: a command that the trainer does not have."""
    with pytest.raises(Broken, match=r"No module named trainer\.no_such_command"):
        launch.process(*launch.trainer("no_such_command", load("tiny"), tmp_path), lambda _: None, lambda: False)
    assert load(str(tmp_path / "resolved.yaml")) == load("tiny")


def test_importing_it_is_cheap():
    code = "import sys, tasks.run.guard; sys.exit(bool({'numpy', 'prefect', 'pydantic', 'asyncio'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_training_has_the_grace_of_its_key(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(launch, "process", lambda *_, grace, **__: given.append(grace))
    tracking, turn = SimpleNamespace(name="none"), launch.Turn("train", print)
    stage_run: Any = SimpleNamespace(stopped=lambda work, fenced: None, turn=lambda say: turn, tracking=tracking)
    for command in ("train", "convert"):
        work: Any = SimpleNamespace(folder=tmp_path, say=print)
        run_job(stage_run, work, command, load("tiny", ["gang.grace=7"]))
    assert given == [7, launch.GRACE]
