"""Follow the pages of docs/migrate with a clock: the commands of each example, in an empty folder.

    python -m benchmarks.migration_clock [STACK ...]

The table has a line for each page: seconds of adopt, plan and run, the share of exact answers before and after, and
what became of the model. About three minutes a page on 2 cores. Exit code 1 if a command failed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import migration
from benchmarks.workspace import workspace
from contract import closed_pipe
from flows.adopt.registry import STACKS

ROOT = Path(__file__).parents[1]
ANSWERS = re.compile(r"^held_out/exact_match +(\S+) +(\S+)", re.M)
VERSION = re.compile(r"^\S+ version \d+: ([^.]+)\.", re.M)


def commands(page: str) -> list[list[str]]:
    """Return the commands under the heading Example."""
    example = page.partition("\n## Example\n")[2].partition("\n## ")[0]
    return [line.split() for line in example.splitlines() if line.startswith("    finetune ")]


def follow(page: str, folder: Path) -> tuple[list[float], str]:
    """Run the commands in the folder; return their seconds and the last one's output, or the one's that failed."""
    (folder / "docs").symlink_to(ROOT / "docs")
    environment = os.environ | {"FINETUNE_STORE": str(folder / "store"), "FINETUNE_RUNS": str(folder / "runs")}
    seconds: list[float] = []
    output = ""
    for program, *arguments in commands(page):
        begin = time.monotonic()
        path = Path(sys.executable).with_name(program)
        done = subprocess.run([path, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        seconds.append(time.monotonic() - begin)
        if done.returncode:
            return seconds, f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        output = done.stdout
    return seconds, output


def main() -> int:
    pages = [name.removesuffix(".md") for name in migration.pages() if name != "README.md"]
    names = sys.argv[1:] or pages
    if unknown := sorted(set(names) - set(pages)):
        print(f"no page of {', '.join(unknown)}; pages: {', '.join(pages)}", file=sys.stderr)
        return 2
    print("| page | adopt, s | plan, s | run, s | exact before, after | model |\n|---|---|---|---|---|---|", flush=True)
    failed = 0
    for name in names:
        with workspace(f"migrate-{name}") as folder:
            seconds, output = follow(migration.page(STACKS[name]), folder)
        times = [f"{one:.1f}" for one in [*seconds, *[float("nan")] * 3][:3]]
        answers, version = ANSWERS.search(output), VERSION.search(output)
        fine = bool(answers and version)
        failed += not fine
        found = (f"{answers[1]}, {answers[2]}", version[1]) if answers and version else ("", "failed")
        print(f"| {' | '.join([name, *times, *found])} |", flush=True)
        if not fine:
            print(output, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    closed_pipe.run(main)
