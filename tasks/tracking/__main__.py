"""Ship the remaining events of killed flows: python -m tasks.tracking RUNS.

Exit code 1 if some events remain, 2 if RUNS is not a folder.
"""

import argparse
import sys
import time
from pathlib import Path

from contract import closed_pipe
from tasks.tracking import journal
from tasks.tracking.shipping import drain

LEAVES_WITHIN = 60.0  # seconds; a worker kills a cancelled flow after that


def main() -> int:
    description = "Ship the remaining events of killed flows."
    parser = argparse.ArgumentParser(prog="python -m tasks.tracking", description=description)
    parser.add_argument("runs", metavar="RUNS", type=Path, help="the local folder of runs")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a service (600)")
    parser.add_argument("--after", type=Path, metavar="JOURNAL", help="begin when its owner has ended, or in a minute")
    args = parser.parse_args()
    if not args.runs.is_dir():  # otherwise the command would report: nothing waits
        print(f"error: {args.runs}: no such folder; FINETUNE_RUNS names it, or it is runs/", file=sys.stderr)
        return 2
    until = time.monotonic() + LEAVES_WITHIN
    while args.after and journal.is_held(args.after) and time.monotonic() < until:
        time.sleep(0.2)
    lines = drain(args.runs.absolute() / "tracking", args.timeout)
    print("\n".join(lines or ["nothing waits"]))
    return int(any(": they wait: " in line for line in lines))


if __name__ == "__main__":
    closed_pipe.run(main)
