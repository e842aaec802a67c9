"""A training that has failed ends, also where its cleanup never does."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import threading, time
    from trainer.training import bridge_loop

    bridge_loop.CLEANUP_SECONDS, bridge_loop.END_SECONDS = 0.2, {end}
    bridge_loop.bounded({cleanup})()
    {then}
    print("here")
"""


def run(cleanup: str, then: str = "pass", end: float = 0.5) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(cleanup=cleanup, then=then, end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_cleanup_that_ends_changes_nothing():
    ended = run("lambda: print('cleaned')", then="time.sleep(1)")
    assert (ended.returncode, ended.stdout) == (0, "cleaned\nhere\n")


def test_what_has_failed_is_told_although_the_cleanup_waits():
    ended = run("lambda: time.sleep(100)", end=50)
    assert ended.returncode == 0
    assert "not destroyed within 0.2 s" in ended.stdout
    assert ended.stdout.endswith("here\n")


def test_a_process_that_does_not_end_then_is_ended():
    ended = run("lambda: time.sleep(100)", then="threading.Event().wait()")
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
