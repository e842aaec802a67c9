"""tasks/servers/waiting.py: every wait has a limit, and reports itself."""

import subprocess
import sys

import pytest

from contract.faults import Fault
from tasks.servers import waiting
from tasks.servers.waiting import Wait
from tests.support.flow_world import ROOT


def test_a_wait_is_reported_and_ends_at_its_limit_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "EVERY", 0.2)
    monkeypatch.setattr(waiting, "PAUSE", 0.05)
    log, lines = tmp_path / "x.log", []
    log.write_text("starting\nno space left\n\n")
    wait = Wait("toy server", 1.0, log, lines.append)
    with pytest.raises(Fault) as caught:
        while True:
            wait.pause()
    assert str(caught.value) == f"toy server: not ready after 1 s; its log: {log}; no space left"
    assert 3 <= len(lines) <= 5 and lines[0] == "toy server: 0 s (at most 1)"


CODE = """
import os, signal, sys, time
from tasks.servers.waiting import limited_end
with limited_end(0.5, "later"):
    if sys.argv[1] == "stuck":
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Prefect's handler, whose requests are tried again
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
os.kill(os.getpid(), signal.SIGCHLD)
time.sleep(1)
"""


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [("stuck", 143, "error: cut off 0 s after the signal: a server does not answer; later\n"), ("well", 0, "")],
)
def test_a_process_that_does_not_end_after_a_signal_is_cut_off(kind, code, line):
    done = subprocess.run([sys.executable, "-c", CODE, kind], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (code, line)


IGNORED = """
import os, signal, time, weakref
from prefect.exceptions import TerminationSignal
from tasks.servers.waiting import no_lost_signals

def raised(number, _frame):
    raise TerminationSignal(signal=number)

class Referred:
    pass

signal.signal(signal.SIGTERM, raised)
with no_lost_signals():
    referred = Referred()
    reference = weakref.ref(referred, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        del referred
        time.sleep(20)
    except TerminationSignal:
        print("ended")
"""


def test_a_signal_in_a_callback_whose_exceptions_are_ignored_is_sent_again():
    done = subprocess.run([sys.executable, "-c", IGNORED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
