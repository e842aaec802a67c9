"""tasks/run/guard.py: whoever asked dies or changes his mind, and nothing of the command is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tasks.run import guard

ROOT = Path(__file__).parents[3]
GRACE = 0.5
GONE_WITHIN = GRACE + 2

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
# A daemon as in the textbook, stubborn besides: two forks, a session of its own, nothing inherited.
DAEMON = f"""
import os, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-c", "import signal, time\\nfor s in (1, 2, 15): signal.signal(s, "
                 "signal.SIG_IGN)\\ntime.sleep(60)", os.environ["MARK"]])
    os._exit(0)
os.wait()
{STUBBORN}
"""


@pytest.fixture
def mark(monkeypatch):
    """In the environment of all that a test starts, so that whatever is left is found, and ended."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Living processes that have the mark in their environment; this one's was set after it started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def guarded(code: str, *python: str) -> subprocess.Popen:
    command = guard.guarded([sys.executable, *python, "-c", code], GRACE)
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def started(process: subprocess.Popen, line: str = "up\n") -> None:
    assert process.stdout.readline() == line


def nothing_left(mark: str, within: float = GONE_WITHIN) -> bool:
    until = time.monotonic() + within
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return marked(mark) == []


def finish(process: subprocess.Popen) -> int:
    with process:
        pass
    return process.returncode


@pytest.mark.parametrize("code", [0, 1, 2, 77, 255])
def test_an_exit_code_passes_through(mark, code):
    process = guarded(f"import os; os._exit({code})")
    assert process.wait(10) == code
    finish(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_s_code_is_as_a_shell_s(mark, number):
    process = guarded(f"import os; os.kill(os.getpid(), {int(number)})")
    assert process.wait(10) == 128 + number
    finish(process)


def test_a_command_that_is_not_there():
    command = [sys.executable, "-m", "tasks.run.guard", "/no/such/program"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.PIPE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "/no/such/program: No such file or directory\n")


def close_stdin(process):
    process.stdin.close()


def terminate(process):
    process.terminate()


def hang_up(process):
    process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize("code", [STUBBORN, DAEMON], ids=["stubborn", "daemon"])
@pytest.mark.parametrize("end", [close_stdin, terminate, hang_up])
def test_nothing_is_left_however_the_end_is_asked_for(mark, code, end):
    process = guarded(code)
    started(process)
    end(process)
    assert process.wait(GONE_WITHIN) == 128 + signal.SIGKILL
    assert marked(mark) == []
    finish(process)


def test_a_command_has_its_grace_and_its_own_code(mark):
    code = "import signal, sys, time\ndef leave(*_):\n    time.sleep(0.2); print('saved', flush=True); sys.exit(9)\n"
    process = guarded(code + "signal.signal(signal.SIGTERM, leave); print('up', flush=True); time.sleep(60)")
    started(process)
    process.stdin.close()
    assert process.stdout.readline() == "saved\n"
    assert process.wait(GONE_WITHIN) == 9
    finish(process)


def test_terminated_again_and_again_it_still_waits_for_its_grace(mark):
    process = guarded(STUBBORN)
    started(process)
    began = time.monotonic()
    while process.poll() is None:
        process.terminate()
        time.sleep(0.05)
    assert GRACE <= time.monotonic() - began < GONE_WITHIN
    finish(process)


def test_the_asker_is_killed(mark, tmp_path):
    asker = f"""
import subprocess, sys, time
guard = subprocess.Popen({guard.guarded([sys.executable, "-c", DAEMON], GRACE)!r}, stdin=subprocess.PIPE)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", asker], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    started(process)
    assert len(marked(mark)) >= 4  # asker, guard, command, daemon
    process.kill()
    assert nothing_left(mark)
    finish(process)


def test_a_command_ends_and_leaves_children_behind(mark):
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    process = guarded(f"{child}; import time; time.sleep(0.5); sys.exit(3)")
    assert process.wait(10) == 3
    assert marked(mark) == []
    finish(process)


def test_a_tree_that_goes_on_forking_is_ended(mark):
    fork = "import os, time\nprint('up', flush=True)\nfor _ in range(4): os.fork()\n"
    process = guarded(fork + "while True:\n    if not os.fork(): time.sleep(0.05); os._exit(0)\n    os.wait()")
    started(process)
    time.sleep(0.3)
    process.stdin.close()
    process.wait(GONE_WITHIN)
    assert marked(mark) == []
    finish(process)


def test_the_guard_is_killed_and_takes_the_command_along(mark):
    process = guarded(STUBBORN)
    started(process)
    process.kill()
    assert nothing_left(mark)
    finish(process)


def test_the_guard_is_killed_before_the_command_is_told(mark):
    """Wherever between its start and the command's the kill falls."""
    for delay in (0.0, 0.02, 0.05, 0.1):
        process = guarded(STUBBORN)
        time.sleep(delay)
        process.kill()
        finish(process)
    assert nothing_left(mark)
