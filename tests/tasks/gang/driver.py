"""A controller by itself, for tests: python tests/tasks/gang/driver.py JOB CONF FOLDER STORE [key=value ...]

Trains, converts, reinforces or asks a reference as the stages have it done, without Prefect. SIGTERM is the user's
cancel. The last line says how it ended.
"""

import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from conf.load import load
from conf.planner.fewer_hosts import fewer_hosts, less_memory
from contract.faults import Fault, Stopped
from tasks.gang import controller
from tasks.gang.attempt import Gang
from tasks.gang.engines import engine_of
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import Training, job_of
from tasks.run.launch import Broken
from tasks.store import open_store

# What each writes.
WRITES = {"train": "output", "convert": "base", "reference": "reference", "reinforce": "reinforced"}


def main() -> int:
    command, conf, folder, uri, *overrides = sys.argv[1:]
    work = Path(folder)
    (work / "files").mkdir(parents=True, exist_ok=True)
    writes = WRITES[command]
    paths = [f"paths.{writes}={work}/files", f"paths.logs={work}/logs", f"paths.parity={work}/files/parity.json"]
    run = load(conf, [*overrides, *paths])
    cancelled, began = threading.Event(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: cancelled.set())

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} {line}", flush=True)

    try:
        job = Training(run) if command == "train" else job_of(command, run)
        assert job
        store, engine = open_store(uri, hasty=True), engine_of(job.run)
        teller = Teller(History(work.name, run.name, ""), work / "files/metrics.jsonl", work=work)
        fits = fewer_hosts(job.run, job.trains)
        controller.carry_out(
            Gang(work.name, work, job, store, engine, teller, say, cancelled.is_set, fits=fits, advice=less_memory)
        )
    except (Fault, Stopped, Broken) as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
