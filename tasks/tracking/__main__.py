"""python -m tasks.tracking RUNS: ship what killed flows left behind; exit code 1 if some of it has to wait."""

import argparse
import sys
from pathlib import Path

from tasks.tracking.shipping import drain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.tracking", description="Ship what killed flows left behind.")
    parser.add_argument("runs", metavar="RUNS", type=Path, help="the local folder of runs")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a service (600)")
    args = parser.parse_args()
    lines = drain(args.runs.absolute() / "tracking", args.timeout)
    print("\n".join(lines or ["nothing waits"]))
    return int(any(": they wait: " in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
