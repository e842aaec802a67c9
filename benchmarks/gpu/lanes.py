"""Run several lists of commands at the same time, each list on its own GPUs of this host.

    benchmarks/gpu/run lanes.py FOLDER PLAN.yaml         starts the lists and returns; they continue in the background
    benchmarks/gpu/run lanes.py FOLDER                   prints the state of each command and the end of its log
    benchmarks/gpu/run lanes.py FOLDER --pack FILE       also packs all results below 4 MB into FILE (.tar.xz)

A plan has a lane for each list. The name of a lane is the GPUs that it uses, or "" for none:

    "0":
    - {name: qwen35, seconds: 1000, run: whole_flow.py OUT --preset qwen35-35b-1xh100}
    "0,1":
    - {name: gang, seconds: 300, run: gang.py OUT}

A command has the arguments of benchmarks/gpu/run. OUT becomes FOLDER/NAME, which also gets the command's output in the
file log. A command that takes longer than its seconds is stopped with all its processes. The commands run in
FOLDER/tree, a copy of this project, so this folder may change while they run. FOLDER must not exist. Every 5 seconds
FOLDER/machine.csv gets a line with the used disk and memory, and the memory and load of each GPU.
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
    """Copy the project and the plan, and start a background process for the lanes."""
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
    """Stop a command with all its processes. They have GRACE seconds to write their results."""
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
