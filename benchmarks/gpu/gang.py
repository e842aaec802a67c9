"""Faults of gangs on GPUs, and how the gangs get over them: two hosts of one GPU each, both of this machine.

    benchmarks/gpu/run gang.py OUT [--layout NAME ...] [--fault NAME ...] [--seconds S] [--seed N]      8 minutes on
    two H200
    benchmarks/gpu/run gang.py OUT --minutes 25 [--every 5] [--layout NAME]      one training for 25 minutes
    python benchmarks/gpu/gang.py OUT --cpu-only                                 tests this script

One GPU trains tiny GLM-4-MoE first; then, for each layout, a gang does (tests/tasks/gang/driver.py, pre-flight on, a
checkpoint every 10 steps), and the faults come to it one after another, each 11 to 19 steps after it has got over the
last one. Over TCP, NCCL uses sockets alone, as between hosts without RDMA; else NVLink, where it cannot tell a peer
that died from one that is late. For each fault: seconds until it is noticed (the board says stop), until no process of
the attempt is left, until nvidia-smi shows as much free memory as before all, and until the next step; steps that were
made twice; processes left. Right is a gang that names the cause, leaves nothing, and has the losses of one GPU.
A controller that has ended is started again once all is clean. OUT/gang.txt and .json grow with each fault; what all
ranks said is in OUT/LAYOUT.log. Exit code 1 if any is not right.

With --minutes, faults come to one training in random order at fixed intervals, the first after half an interval. At
least GOOD of the seconds since the first step must be effective, and their sum must be the time by this script's clock
(benchmarks/effective_time.py). A repeated step must have the same loss again. OUT/effective.txt has the seconds.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from gang_faults import FAULTS, Row, meet
from gang_life import MARK, ROOT, SAVED, Gang, end, losses, memory, wait

sys.path.insert(0, str(ROOT))

from benchmarks import effective_time

BOUND = 1e-3  # relative
GOOD = 0.93  # least share of effective time
SHORT, LAST = 60.0, 3 * SAVED  # seconds and steps with which no other fault is begun
LOGGED = 20000  # characters of each piece of a log
KEPT = ("attempts.json", "files/phases.jsonl")  # seconds of each attempt and phase
SETTINGS = ["train.validate_every=0", "optimizer.lr=1e-3", "hardware.gpu=h200"]
SETTINGS += ["train.micro_batch=2", "gang.start_within=60"]
SHORT_STEPS = [f"checkpoint.save_every={SAVED}", "train.global_batch=8"]
LONG_STEPS = ["checkpoint.save_every=25", "train.global_batch=64", "train.steps=100000"]  # with --minutes
LAYOUTS = {
    "pp2 TCP": ("layout.pp=2", True),
    "dp2 ep2": ("layout.ep=2", False),
    "dp2 TCP": ("layout.ep=1", True),
    "pp2": ("layout.pp=2", False),
    "dp2 ep2 TCP": ("layout.ep=2", True),
}
TAKEN = "memory taken"  # a fault only on GPUs, and only of a training that starts with it
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def live(gang: Gang, faults: list[str], expected: dict[int, float], out: "Out", until: float) -> list[Row]:
    """Run a gang through its whole life. Returns a row for each fault, and one for the time before the first."""
    rows, idle = [Row(gang.name, "none")], memory()
    gang.folder.mkdir()
    try:
        for name in faults:
            if time.time() > until - SHORT or gang.step() > max(expected) - LAST:
                break
            rows.append(meet(gang, name, idle, until))
            out.write(rows)
        with contextlib.suppress(TimeoutError):
            wait(gang.ended, gang, seconds=max(1.0, until - time.time()))
        assert gang.controller
        code = gang.controller.poll()
    finally:
        end(gang)
        out.log(gang)
    if code or (code is None and time.time() < until):
        rows[-1].wrong = rows[-1].wrong or "it does not end"
    rows[-1].orphans += len(gang.pids())
    compare(rows, gang, expected)
    out.write(rows)
    return rows


def timed(gang: Gang, faults: list[str], out: "Out", minutes: float, every: float) -> list[Row]:
    """Run a gang with a fault at fixed intervals. Write its effective time, and return a row for each fault."""
    rows, idle, seen, names = [], memory(), {}, []
    gang.folder.mkdir()
    try:
        gang.start()
        wait(lambda: gang.step() > 0 or gang.ended(), gang)
        began, before = time.time(), effective_time.seconds(gang.folder, 2)
        until = began + 60 * minutes
        for number in range(int(minutes / every)):
            names = names or random.sample(faults, len(faults))
            time.sleep(max(0.0, began + (number + 0.5) * 60 * every - time.time()))
            seen = losses(gang.lines()) | seen
            rows.append(meet(gang, names.pop(), idle, until))
            print(line(rows[-1]), flush=True)
            out.write(rows)
        time.sleep(max(0.0, until - time.time()))
        after, wall = effective_time.seconds(gang.folder, 2), time.time() - began
        found = losses(gang.lines())
    finally:
        end(gang)
        out.log(gang)
    share, wrong = effective_time.since(before, after, wall, GOOD)
    again = [abs(found[step] / seen[step] - 1) for step in seen if step in found]
    wrong += ["other losses"] * (max(again, default=0.0) > BOUND)
    rows[-1].wrong = "; ".join(filter(None, [rows[-1].wrong, *wrong]))
    out.write(rows)
    text = f"{share}\n{len(found)} steps, {len(again)} losses compared: at most {max(again, default=0.0):.1e} apart\n"
    (out.folder / "effective.txt").write_text(text)
    print(text, flush=True)
    return rows


def compare(rows: list[Row], gang: Gang, expected: dict[int, float]) -> None:
    found = losses(gang.lines())
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following.first if following else max(found, default=0)
        steps = range(row.first + 1, last + 1)
        if missing := [step for step in steps if step not in found or step not in expected]:
            row.wrong = row.wrong or f"step {missing[0]} is missing"
            continue
        row.difference = max((abs(found[step] / expected[step] - 1) for step in steps), default=None)
        if row.difference is not None and not row.difference <= BOUND:
            row.wrong = row.wrong or "other losses"


class Out:
    """Writer of the table, and of files with more detail."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, {}

    def write(self, rows: list[Row]) -> None:
        self.rows[rows[0].layout] = rows
        every = [row for of in self.rows.values() for row in of]
        (self.folder / "gang.json").write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
        (self.folder / "gang.txt").write_text("\n".join([HEAD, *map(line, every)]) + "\n")

    def log(self, gang: Gang) -> None:
        with (self.folder / f"{gang.folder.name}.log").open("w") as file:
            print(gang.output(), file=file)
            logs = [*sorted(gang.board().glob("*/nodes/*.json")), *sorted(gang.board().glob("*/logs/*/*"))]
            for path in [*(gang.folder / name for name in KEPT if (gang.folder / name).exists()), *logs]:
                print(f"\n===== {path.name}, {path.parent}\n{path.read_text(errors='replace')[-LOGGED:]}", file=file)


HEAD = (
    "| layout | fault | right | noticed | clean | memory free | next step | steps twice | orphans "
    "| largest difference | what is said |\n" + "|---" * 11 + "|"
)


def line(row: Row) -> str:
    seconds = ["" if value is None else f"{value:.1f}" for value in (row.noticed, row.clean, row.freed, row.resumed)]
    difference = "" if row.difference is None else f"{row.difference:.1e}"
    lost = "" if row.lost is None else row.lost
    cells = [row.layout, row.fault, row.wrong or "yes", *seconds, lost, row.orphans, difference, row.says]
    return "| " + " | ".join(map(str, cells)) + " |"


def prepare(work: Path, environment: dict[str, str]) -> list[str]:
    """Make the model, prepare the data and convert the model. Return the keys of their paths."""
    paths = [f"paths.{name}={work / name}" for name in ("model", "base", "data")]
    rows = work / "rows"
    commands = [["tiny", "glm4-moe", str(work / "model"), "--dtype", "float32"]]
    commands += [["tiny", "data", str(rows), "--rows", "512"]]
    commands += [["prepare", "tiny", *paths, f"data.source={rows / 'training.jsonl'}"], ["convert", "tiny", *paths]]
    for command in commands:
        _trainer(command, environment)
    return paths


def one_gpu(work: Path, environment: dict[str, str], settings: list[str]) -> dict[int, float]:
    """Train on one GPU. Return its losses by step."""
    places = {"output": "one", "logs": "one/logs", "parity": "one/parity.json"}
    paths = [f"paths.{name}={work / place}" for name, place in places.items()]
    _trainer(["train", "tiny", *settings, *paths], environment)
    lines = [json.loads(line) for line in (work / "one/metrics.jsonl").read_text().splitlines()]
    return losses(lines)


def _trainer(command: list[str], environment: dict[str, str]) -> None:
    line = [sys.executable, "-m", f"trainer.{command[0]}", *command[1:]]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"trainer.{command[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}")


def main() -> int:
    options = _arguments()
    if len(memory()) < 2 and not options.cpu_only:
        print("two GPUs are wanted, and nvidia-smi shows fewer", file=sys.stderr)
        return 2
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    until, out, rows = time.time() + options.seconds, Out(options.out), []
    # Transformer Engine multiplies fp32 in TF32 else, good to three digits.
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="gang-") as folder:
        work = Path(folder)
        settings = [*SETTINGS, *prepare(work, environment)]
        settings += LONG_STEPS if options.minutes else [*SHORT_STEPS, f"train.steps={options.steps}"]
        expected = {} if options.minutes else one_gpu(work, environment, settings)
        print(f"{time.time() - until + options.seconds:.0f} s to prepare\n{HEAD}", flush=True)
        faults = [
            name for name in options.fault or FAULTS if name != TAKEN or not (options.cpu_only or options.minutes)
        ]
        for name in options.layout or LAYOUTS:
            place, (layout, tcp) = work / name.replace(" ", "-"), LAYOUTS[name]
            command = [sys.executable, str(ROOT / "tests/tasks/gang/driver.py"), "train", "tiny", str(place)]
            command += [str(work / "store"), *settings, "layout.nodes=2", "layout.gpus_per_node=1", layout]
            gang = Gang(name, place, command, environment | (TCP if tcp else {}) | {MARK: str(place)})
            if options.minutes:
                rows = timed(gang, faults, out, options.minutes, options.every)
                break
            if time.time() < until - 90:
                rows += live(gang, faults, expected, out, until)
                print("\n".join(map(line, rows[-len(faults) - 1 :])), flush=True)
    return 0 if rows and not any(row.wrong for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--layout", nargs="+", metavar="NAME", choices=LAYOUTS)
    parser.add_argument("--fault", nargs="+", metavar="NAME", choices=FAULTS)
    parser.add_argument("--seconds", type=float, default=540, help="nothing new is begun late (default 540)")
    parser.add_argument("--steps", type=int, default=240, help="of each run; a fault takes about 20 (default 240)")
    parser.add_argument("--minutes", type=float, help="one training of this time, with random faults")
    parser.add_argument("--every", metavar="MINUTES", type=float, default=5, help="with --minutes: between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-only", action="store_true", help="without GPUs, and without the fault of their memory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
