"""Answer prompts with vLLM on a separate host, for reinforcement learning that trains on another host.

    torchrun ... -m trainer.reinforcement.engines.guest RESOLVED.yaml     started by a gang; each process is an engine

The engine connects to trainer.reinforce of the same gang, and ends with it. vLLM's output is in
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

LOOKED = 0.5  # seconds between heartbeats while vLLM's process runs


def main(run: Run) -> None:
    # The trainer still needs answers while it saves after SIGTERM. It ends this process by closing the connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host = (os.environ.get("GANG_HOST") or socket.gethostname()).replace("/", "-")
    number = int(os.environ["LOCAL_RANK"])
    log = Path(run.paths.logs) / f"rollout-{host}-{number}.log"
    heartbeat.phase("connecting to the trainer")
    with meeting.connect(run, log) as connection:
        process = engine.start(connection, settings.of(run), log, settings.environment(run, number))
    while process.poll() is None:
        heartbeat.phase("answering prompts")
        time.sleep(LOOKED)
    if process.returncode:
        raise RuntimeError(f"vLLM's process has ended with code {process.returncode}; its last lines are in {log}")


def check(run: Run) -> None:
    if "GANG_ATTEMPT" not in os.environ:
        raise Fault("reinforce.hosts: only a gang starts engines on other hosts: python -m flows.finetune")


if __name__ == "__main__":
    entry.start(main, check, alone=True)
