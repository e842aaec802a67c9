"""Faults that are done to a gang of gang.py, and the measurement of their effects."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from gang_life import GREED, PATIENCE, Gang, free, release, wait

TOLD = (
    r"(?m)^ *[\d.]+ (.*; (?:continues|resumes) .*|(?:Fault|Broken|Stopped): .*)$"  # what a controller says of a failure
)


@dataclass
class Row:
    layout: str
    fault: str
    noticed: float | None = None
    clean: float | None = None
    freed: float | None = None
    resumed: float | None = None
    lost: int | None = None
    orphans: int = 0
    difference: float | None = None  # largest, of the steps from here to the next fault
    says: str = ""
    wrong: str = ""
    first: int = 0  # step that it went on from


def kill_rank(gang: Gang) -> None:
    gang.wait_for_steps()
    gang.strike(random.choice(gang.ranks()).kill)


def stop_rank(gang: Gang) -> None:
    gang.wait_for_steps()
    gang.strike(random.choice(gang.ranks()).suspend)


def kill_member(gang: Gang) -> None:
    gang.wait_for_steps()
    gang.strike(random.choice(gang.members()).kill)


def kill_controller(gang: Gang) -> None:
    gang.wait_for_steps()
    assert gang.controller
    gang.strike(gang.controller.kill)


def cancel(gang: Gang) -> None:
    gang.wait_for_steps()
    assert gang.controller
    gang.strike(gang.controller.terminate)


def kill_while_saving(gang: Gang) -> None:
    gang.wait_for_steps()
    victim, last = random.choice(gang.ranks()), gang.step()

    def half() -> bool:
        saves = (gang.folder / "files/checkpoints").glob("iter_*")
        return any(int(save.name[5:]) >= last and not (save / "complete.json").exists() for save in saves)

    wait(half, gang, 0.001)
    gang.strike(victim.kill)


def take_memory(gang: Gang) -> None:
    """Take memory while ranks load: between pre-flight, which would refuse such a GPU, and the first step."""
    if gang.controller:
        gang.wait_for_steps()
        gang.controller.terminate()
        gang.controller.wait()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(random.randrange(2)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    gang.greedy = subprocess.Popen(
        [sys.executable, "-c", GREED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert gang.greedy.stdin and gang.greedy.stdout
    gang.greedy.stdout.readline()
    checked, began = gang.folder / "logs/preflight.json", time.time()
    gang.start()
    wait(lambda: (checked.exists() and checked.stat().st_mtime > began) or gang.ended(), gang)
    time.sleep(random.uniform(0, 4))
    stdin = gang.greedy.stdin
    gang.strike(lambda: (stdin.write(b"\n"), stdin.flush())[1])


FAULTS: dict[str, tuple[Callable[[Gang], None], str]] = {  # and what the controller is to say
    "rank SIGKILL": (kill_rank, r"host: rank \d on \S+/\d after step \d+: killed by SIGKILL"),
    "rank SIGSTOP": (stop_rank, r"hang: rank \d on \S+/\d after step \d+: stopped \(SIGSTOP"),
    "member SIGKILL": (kill_member, r"host: \S+/\d no longer answers"),
    "SIGKILL in a save": (kill_while_saving, r"host: rank \d on \S+/\d after step \d+: killed by SIGKILL"),
    "controller SIGKILL": (kill_controller, r"waits until attempt \d+, whose controller is gone, has ended"),
    "cancel": (cancel, r"Stopped: \S+: stopped"),
    "memory taken": (take_memory, r"Fault: memory: rank \d on \S+/\d( after step \d+)?: .*; (try|no layout)"),
}


def meet(gang: Gang, name: str, idle: list[int], until: float) -> Row:
    row, (fault, says) = Row(gang.name, name), FAULTS[name]
    fault(gang)
    last = min(until, time.time() + PATIENCE)
    while row.resumed is None and time.time() < last:
        passed = time.time() - gang.struck
        if row.noticed is None and gang.stopped():
            row.noticed = passed
        if row.clean is None and not gang.before & gang.pids():
            row.clean = passed
        if row.clean is not None and gang.ended() and gang.greedy:
            release(gang)
        if row.freed is None and row.clean is not None and free(idle):
            row.freed = time.time() - gang.struck
        if row.freed is not None and gang.ended():
            gang.start()
        see_resumed(gang, row)
        time.sleep(0.1)
    release(gang)
    row.orphans = len(gang.before & gang.pids())
    found = re.search(f"({says}).*", gang.output()[gang.said :])
    row.says = found[0] if found else " / ".join(re.findall(TOLD, gang.output()[gang.said :]))
    if row.resumed is None:
        row.first = gang.step()
        row.wrong = "it does not go on" if time.time() < until else "out of time"
    elif not found:
        row.wrong = "another cause"
    elif row.orphans or row.clean is None or row.freed is None:
        row.wrong = "something is left"
    return row


def see_resumed(gang: Gang, row: Row) -> None:
    lines = gang.lines()
    starts = [line for line in lines if line["kind"] == "start" and line["time"] > gang.struck]
    steps = [line for line in lines if line["kind"] == "train" and starts and line["time"] > starts[-1]["time"]]
    if steps:
        row.resumed = steps[0]["time"] - gang.struck
        row.first = starts[-1]["step"]
        row.lost = max(0, gang.at - row.first)
