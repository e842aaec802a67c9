"""Answer prompts by vLLM on a host of its own, for a reinforcement learning that trains on another one.

    torchrun ... -m trainer.reinforcement.engines.guest RESOLVED.yaml     as a gang starts it; each process is an engine

It comes to trainer.reinforce of the same gang, and ends with it. What vLLM prints is in
<paths.logs>/rollout-HOST-N.log.
"""

import os
import signal
import socket
import time
from pathlib import Path

from conf.schema.run import Run
from contract.faults import Fault
from trainer.reinforcement.engines import engine, meeting, settings
from trainer.startup import entry, heartbeat

LOOKED = 0.5  # seconds between signs that vLLM's process is there


def main(run: Run) -> None:
    # The trainer still asks while it saves. It ends this process by ending the connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host = (os.environ.get("GANG_HOST") or socket.gethostname()).replace("/", "-")
    number = int(os.environ["LOCAL_RANK"])
    log = Path(run.paths.logs) / f"rollout-{host}-{number}.log"
    heartbeat.phase("comes to the trainer")
    with meeting.come(run, log) as connection:
        process = engine.start(connection, settings.of(run), log, settings.environment(run, number))
    while process.poll() is None:
        heartbeat.phase("answers")
        time.sleep(LOOKED)
    if process.returncode:
        raise RuntimeError(f"vLLM's process has ended with code {process.returncode}; its last lines are in {log}")


def check(run: Run) -> None:
    if "GANG_ATTEMPT" not in os.environ:
        raise Fault("reinforce.hosts: a gang starts engines of other hosts, beside trainer.reinforce: flows.finetune")


if __name__ == "__main__":
    entry.start(main, check, alone=True)
