"""One host of a gang, as a run of the deployment node/<pool>: tasks/gang/engines/prefect.py makes N of them at once.

Not to be started by hand. What it starts ends with this process, and with the worker above it, by whatever they die.
"""

import os
import tempfile
from pathlib import Path

import psutil
from prefect import State, flow, get_run_logger
from prefect.states import Completed, Failed

from tasks import launch
from tasks.processes import started


@flow(name="node", persist_result=False)
def node(arguments: list[str]) -> State:
    """Be one host of a run over several.

    Args:
        arguments: Of the member, after python -m.
    """
    starters = [f"--starter={pid}:{started(pid)}" for pid in _until_worker()]
    keep = [name for name in os.environ if name.startswith("AWS_")]  # the store's; ranks get none of them
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        try:
            log = Path(folder) / "member.log"
            launch.process([*arguments, *starters], log, get_run_logger().info, lambda: False, keep=keep)
        except launch.Broken as error:
            return Failed(message=str(error))
    return Completed(message="over")


def _until_worker() -> list[int]:
    """This process and those above it that are Prefect's."""
    me = psutil.Process()
    above = [parent.pid for parent in me.parents() if any(Path(part).name == "prefect" for part in parent.cmdline())]
    return [me.pid, *above]
