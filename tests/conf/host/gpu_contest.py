"""Processes that want GPUs of a host that has none: who has what is noted by other locks, and some are killed.

    python -m tests.conf.host.gpu_contest [TRIALS] [--seed N]

Each trial draws a host of 1 to 8 GPUs and 3 to 6 processes. Each process takes as many as it draws, again and again,
under the name of one of two flows. Exit code 1: two had one GPU, somebody waited for ever, or something was left.
"""

import argparse
import contextlib
import fcntl
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from conf.host import gpu_locks, nvidia_smi

WITHIN = 60.0  # seconds in which all of a trial are served, on a busy machine
TWO = 3  # exit code of a process that has found another one's note on its GPU


def trial(seed: int) -> tuple[int, list[str]]:
    """Number of processes that were killed, and what went wrong."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gpu-contest-") as folder:
        gpus = [f"GPU-{number}" for number in range(chance.randint(1, 8))]
        listing = "".join(f"GPU {number}: Toy (UUID: {gpu})\n" for number, gpu in enumerate(gpus))
        nvidia_smi._ask = lambda *asked: listing if asked == ("-L",) else ""
        os.environ["FINETUNE_LOCKS"] = f"{folder}/locks"
        living = {
            start(seed, number, Path(folder, "notes"), len(gpus)): number for number in range(chance.randint(3, 6))
        }
        killed: set[int] = set()
        wrong, until = [], time.monotonic() + WITHIN
        while living:
            for pid in [pid for pid in living if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                number = living.pop(pid)
                if code and pid not in killed:
                    wrong.append(f"seed {seed}: process {number} ended with {code}" + " (two had one)" * (code == TWO))
            if living and chance.random() < 0.05:
                victim = chance.choice([*living])
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
            if time.monotonic() > until:
                wrong += [f"seed {seed}: process {number} waits for ever" for number in living.values()]
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                break
            time.sleep(0.005)
        if gpu_locks.claimed(tuple(gpus)) or gpu_locks.standing():
            wrong.append(f"seed {seed}: left: {gpu_locks.standing()}")
        return len(killed), wrong


def start(seed: int, number: int, notes: Path, count: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = compete(random.Random(seed * 100 + number), number, notes, count)
    finally:
        os._exit(code)


def compete(chance: random.Random, number: int, notes: Path, count: int) -> int:
    # Opened before the locks, as a killed process's files are closed in the order of their numbers.
    noted = os.open(notes, os.O_RDWR | os.O_CREAT)
    for _ in range(chance.randint(1, 3)):
        asked, rank = chance.choice([1, count, chance.randint(1, count)]), chance.randint(0, 1)
        flow = f"flow {number % 2}"
        with contextlib.closing(
            gpu_locks.take(f"{number} of {flow}", lambda line: None, count=asked, flow=flow, rank=rank)
        ) as hold:
            assert hold and len({*hold.gpus}) == asked
            for gpu in hold.gpus:
                try:
                    fcntl.lockf(noted, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(gpu.rpartition("-")[2]))
                except OSError:
                    return TWO
            time.sleep(chance.uniform(0, 0.02))
            fcntl.lockf(noted, fcntl.LOCK_UN)
        time.sleep(chance.uniform(0, 0.01))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conf.host.gpu_contest")
    parser.add_argument("trials", nargs="?", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    gpu_locks.TRIED = 0.01
    began = time.monotonic()
    results = [trial(seed) for seed in range(options.seed, options.seed + options.trials)]
    wrong, killed = [line for _, lines in results for line in lines], sum(count for count, _ in results)
    seconds = time.monotonic() - began
    print("\n".join([*wrong, f"{options.trials} trials, {killed} killed, {len(wrong)} wrong, {seconds:.0f} s"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
