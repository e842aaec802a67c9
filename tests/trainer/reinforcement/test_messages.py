"""Messages to a process that is gone."""

import subprocess
import sys
from multiprocessing import Pipe

from trainer.reinforcement import messages

LEAVES = """
import gc
import sys
from multiprocessing import Pipe
from trainer.reinforcement import messages
def tell(connection):
    try:
        messages.send(connection, ("begin", list(range(10000))))
    except OSError:
        raise ValueError("it has ended") from None
mine, theirs = Pipe()
theirs.close()
try:
    tell(mine)
except ValueError as error:
    error.itself = error  # garbage that only the collector finds
gc.collect()
sys.exit(2)
"""


def test_the_other_side_gets_what_was_sent():
    mine, theirs = Pipe()
    messages.send(mine, ("score", {"rows": [[1, 2]]}))
    assert theirs.recv() == ("score", {"rows": [[1, 2]]})


def test_a_command_that_tells_of_an_end_leaves_with_its_own_code():
    said = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (2, "")
