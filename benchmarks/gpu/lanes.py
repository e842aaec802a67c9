"""Run lists of commands side by side, each list on its own GPUs of this host. They go on when the shell has ended.

    benchmarks/gpu/run lanes.py FOLDER PLAN.yaml         starts the lanes and returns
    benchmarks/gpu/run lanes.py FOLDER                   says how far they are, with the last lines of each log
    benchmarks/gpu/run lanes.py FOLDER --pack FILE       the same, and packs all results below 4 MB into FILE (.tar.xz)

A plan has a list of commands for each lane, and a lane is named by its GPUs; "" has none:

    "0":
    - {name: qwen35, seconds: 1000, run: whole_flow.py OUT --preset qwen35-35b-1xh100}
    "0,1":
    - {name: gang, seconds: 300, run: gang.py OUT}

Each command is what benchmarks/gpu/run takes. OUT is FOLDER/NAME, which also gets its output, as log. A command that
takes longer than its seconds is ended with all its processes. The commands run in a copy of this tree, FOLDER/tree,
because a host that is rented by the minute may get the next tree meanwhile. Every 5 seconds FOLDER/machine.csv gets a
line with disk and memory in use, and memory and load of each GPU.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
EVERY, GRACE = 5.0, 20.0  # seconds
SMALL = 4 << 20
GPUS = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]


def start(folder: Path, plan: Path) -> None:
    """Copy tree and plan, and start the lanes in a session of their own."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    shutil.copy(plan, folder / "plan.yaml")
    lanes = yaml.safe_load(plan.read_text())
    names = [step["name"] for steps in lanes.values() for step in steps]
    if len(names) > len({*names}):
        sys.exit(f"{plan}: two commands have the same name")
    with (folder / "lanes.log").open("w") as log:
        command = [sys.executable, __file__, folder, "--work"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def work(folder: Path) -> None:
    lanes = yaml.safe_load((folder / "plan.yaml").read_text())
    threads = [threading.Thread(target=lane, args=(folder, str(gpus), steps)) for gpus, steps in lanes.items()]
    threading.Thread(target=sample, args=(folder,), daemon=True).start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def lane(folder: Path, gpus: str, steps: list[dict]) -> None:
    for step in steps:
        out = folder / step["name"]
        out.mkdir()
        command = f"exec bash benchmarks/gpu/run {step['run'].replace('OUT', str(out))}"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        report(folder, step["name"], "began")
        with (out / "log").open("w") as log:
            shell = ["bash", "-c", command]
            process = subprocess.Popen(
                shell, cwd=folder / "tree", env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                code = process.wait(step["seconds"])
            except subprocess.TimeoutExpired:
                code = f"{step['seconds']} s are over"
                end(process)
        report(folder, step["name"], f"ended: {code}")


def end(process: subprocess.Popen) -> None:
    """End a command with all its processes: first the command, which may have something to write."""
    below = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in [*below, psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.Error):
                one.send_signal(number)
        psutil.wait_procs(below, GRACE)
    process.wait()


def report(folder: Path, name: str, what: str) -> None:
    with (folder / "state.txt").open("a") as file:
        print(time.strftime("%H:%M:%S"), name, what, file=file)


def sample(folder: Path) -> None:
    with (folder / "machine.csv").open("w") as file:
        print("time,disk GB,memory GB,MiB and % of each GPU", file=file)
        while True:
            gpus = ""
            with contextlib.suppress(OSError):
                gpus = subprocess.run(GPUS, capture_output=True, text=True).stdout.strip().replace("\n", ",")
            used = shutil.disk_usage(folder).used / 1e9, psutil.virtual_memory().used / 1e9
            print(f"{time.strftime('%H:%M:%S')},{used[0]:.0f},{used[1]:.0f},{gpus}", file=file, flush=True)
            time.sleep(EVERY)


def show(folder: Path, lines: int) -> None:
    print((folder / "lanes.log").read_text(), (folder / "state.txt").read_text(), sep="", end="")
    print((folder / "machine.csv").read_text().splitlines()[-1])
    for log in sorted(folder.glob("*/log")):
        print(f"--- {log.parent.name}", *log.read_text(errors="replace").splitlines()[-lines:], sep="\n")


def pack(folder: Path, file: Path) -> None:
    with tarfile.open(file, "w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if inner.parts[0] != "tree" and path.is_file() and path.stat().st_size < SMALL:
                archive.add(path, inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=Path, nargs="?")
    parser.add_argument("--pack", type=Path, metavar="FILE")
    parser.add_argument("--lines", type=int, default=8, help="of each log (8)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.work:
        work(folder)
    elif options.plan:
        start(folder, options.plan)
    else:
        show(folder, options.lines)
        if options.pack:
            pack(folder, options.pack)


if __name__ == "__main__":
    main()
