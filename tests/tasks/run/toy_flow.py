"""A flow that only tracks, for tests that kill it: python -m tests.tasks.run.toy_flow RUNS URI FLOW FILE STEPS.

It trains as the trainer does: goes on after the last checkpoint (every 10 steps), dropping the lines of later steps.
"""

import json
import sys
import time
from pathlib import Path

from tasks import tracking


def write(file: Path, first: int, steps: int, seconds: float) -> list[float]:
    """Lines of metrics from this step on, and how long each step took."""
    took = []
    for step in range(first, steps + 1):
        start = time.monotonic()
        lines = [{"kind": "train", "step": step, "time": time.time(), "lm_loss": 4 / step, "lr": 1e-4, "folder": "x"}]
        if step % 5 == 0:
            lines.append({"kind": "validation", "step": step, "time": time.time(), "lm_loss": 5 / step})
        if step % 10 == 0:
            lines.append({"kind": "checkpoint", "step": step, "time": time.time(), "folder": "x"})
        with file.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        time.sleep(seconds)
        took.append(time.monotonic() - start)
    return took


def resume(file: Path) -> int:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    last = max((line["step"] for line in lines if line["kind"] == "checkpoint"), default=0)
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] <= last))
    partial.rename(file)
    return last + 1


def main(runs: str, uri: str, flow: str, file: str, steps: str) -> None:
    tracking.POLL = 0.1
    t = tracking.start(Path(runs), uri, "toy", flow, flow, params={"steps": steps})
    t.ship()
    train = t.stage("train", id="train-abc", params={"lr": 1e-4})
    train.follow(Path(file))
    print("tracking", flush=True)
    write(Path(file), resume(Path(file)), int(steps), 0.05)
    train.end()
    t.end()
    print(t.close(60) or "told", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
