"""contract/closed_pipe.py: a command behind `| head -1`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.closed_pipe import quiet

ROOT = Path(__file__).parents[2]
BEGIN = "import sys\nfrom contract.closed_pipe import quiet\nwith quiet():\n    "


def unread(*command: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose output has no reader."""
    reads, writes = os.pipe()
    os.close(reads)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('x' * 10**6); print('y', flush=True)", 141),
        ("print('done'); sys.exit(3)", 3),  # its work is done
        ("print('x', flush=True)\nsys.exit(0)", 141),
        ("sys.exit(2)", 2),
    ],
)
def test_a_command_that_nobody_reads_ends_without_a_word(code, expected):
    assert unread("-c", BEGIN + code) == (expected, "")


def test_a_connection_that_breaks_is_an_error_as_ever():
    with pytest.raises(BrokenPipeError), quiet():
        raise BrokenPipeError("peer")


def test_a_trainer_goes_on():
    say = "from trainer.startup.console import say; say('step 1'); say('step 2'); print('whole', file=sys.stderr)"
    assert unread("-c", "import sys; " + say) == (0, "whole\n")


def test_every_command_ends_so():
    for folder in ("flows", "flows/new", "trainer", "conf", "conf/schema", "tasks/tracking", "benchmarks/study"):
        for file in (ROOT / folder).glob("*.py"):
            if (text := file.read_text()).count('if __name__ == "__main__":'):
                calls = ("closed_pipe.run(", "closed_pipe.quiet()", "entry.")
                assert any(call in text for call in calls), f"{file}: contract/closed_pipe.py"
