"""An engine of another host, with a stand-in for vLLM's process: it comes to the trainer, and ends with it.

python -m tests.support.stand_in_guest LOGS SETTINGS.json       GANG_ATTEMPT, GANG_HOST and LOCAL_RANK say which it is
"""

import json
import sys
from pathlib import Path

from conf.load import load
from trainer.reinforcement.engines import engine, meeting


def main(logs: Path, settings: dict) -> None:
    engine.PROGRAM = "tests.support.stand_in_engine"
    run = load("tiny-rl", ["reinforce.hosts=2", f"paths.logs={logs}"])
    log = logs / "guest.log"
    with meeting.connect(run, log) as connection:
        process = engine.start(connection, settings, log, {})
    sys.exit(process.wait())


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
