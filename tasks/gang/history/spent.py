"""Time of a training by category, from its attempts (timeline.py) and rank 0's journal of phases (signs_of_life.py).

    waiting      for hosts or GPUs
    starting     processes start, import and connect
    loading      of the model, the data and the checkpoint, and the first step, which compiles
    training     steps
    repeated     steps that an earlier attempt had already done
    lost         in an attempt that failed, everything after the checkpoint from which the next one resumed, but for its
                 start
    saving       checkpoints
    evaluating   validations
    idle         between attempts and between steps

Effective time is that of training and repeated steps: the time of a step that is done twice is lost once. The seconds
sum to the time from the first attempt's beginning to the last one's end. Durations of phases are by the clock of rank
0, times of attempts by that of the flow's host, so a difference of clocks moves time only between neighbours.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract import signs_of_life
from tasks.gang.history.timeline import DONE, Attempt

CATEGORIES = ("training", "repeated", "saving", "evaluating", "waiting", "starting", "loading", "lost", "idle")
EFFECTIVE = ("training", "repeated")
LEAST = 0.0005  # share that is shown
OF_PHASE = {"starting": "starting", "meeting": "starting", "loading": "loading", "first step": "loading"}
OF_PHASE |= {"training": "training", "saving": "saving", "validating": "evaluating"}

Line = dict[str, Any]


@dataclass
class Spent:
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    gpu_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))

    def add(self, category: str, seconds: float, gpus: int) -> None:
        self.seconds[category] += seconds
        self.gpu_seconds[category] += seconds * gpus


def read(output: Path) -> list[list[Line]]:
    """Return the journal's lines of each start. An unreadable line, which a killed process may leave, is left out."""
    starts: list[list[Line]] = []
    path = output / signs_of_life.JOURNAL
    for text in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        line = _line(text)
        if "start" in line:
            starts.append([])
        if starts and line:
            starts[-1].append(line)
    return starts


def since(journal: str, attempt: int) -> str:
    """Return the text of a gang's journal from the start of this attempt; empty if it has not started."""
    lines = journal.splitlines(keepends=True)
    places = (place for place, text in enumerate(lines) if _line(text).get("attempt") == attempt)
    return "".join(lines[next(places, len(lines)) :])


def _line(text: str) -> Line:
    """Return a line of the journal; empty if it is unreadable."""
    try:
        line = json.loads(text)
        return line if {"time", "step", "seconds"} <= line.keys() else {}
    except (ValueError, AttributeError):
        return {}


def of(attempts: Sequence[Attempt], starts: Sequence[list[Line]], gpus: int) -> Spent:
    """Return the time of attempts. `gpus` are those of the training, for attempts that did not get them."""
    spent, now, reached, lines_of = Spent(), time.time(), 0, _lines(attempts, starts)
    for number, (attempt, lines) in enumerate(zip(attempts, lines_of, strict=True)):
        runs = attempt.ended is None and number == len(attempts) - 1
        ended = now if runs else attempt.ended or _died(attempt, lines)
        later = next((other[0]["start"] for other in lines_of[number + 1 :] if other), None)
        for category, seconds in _of_attempt(attempt, lines, ended - attempt.began, later, reached, runs).items():
            spent.add(category, seconds, attempt.gpus or gpus)
        reached = max([reached, attempt.reached, *(line["step"] for line in lines)])
        following = attempts[number + 1].began if number + 1 < len(attempts) else ended
        spent.add("idle", max(0.0, following - ended), gpus)
    return spent


def _lines(attempts: Sequence[Attempt], starts: Sequence[list[Line]]) -> list[list[Line]]:
    """Return the lines of each attempt: a gang's by their number, others by their time."""
    result: list[list[Line]] = [[] for _ in attempts]
    for lines in starts:
        number = lines[0].get("attempt")
        places = [
            place
            for place, attempt in enumerate(attempts)
            if (attempt.number == number if number else attempt.began <= lines[0]["time"])
        ]
        if places:
            result[places[-1]] += lines
    return result


def _died(attempt: Attempt, lines: Sequence[Line]) -> float:
    """Return when an attempt whose flow died was last seen."""
    return max([attempt.joined or attempt.began, *(line["time"] for line in lines[-1:])])


def _of_attempt(
    attempt: Attempt, lines: Sequence[Line], whole: float, later: int | None, reached: int, runs: bool
) -> dict[str, float]:
    """Return the seconds of an attempt, whose sum is `whole`. `later` is the step from which the next one resumed."""
    waited = min(whole, attempt.joined - attempt.began if attempt.joined else whole)
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"waiting": waited}
    if not lines:
        return seconds | {"starting": whole - waited}
    failed = not runs and attempt.how != DONE
    kept = _saved(lines) if later is None else later
    for line in lines:
        for phase, spent in line["seconds"].items():
            category = OF_PHASE.get(phase, "idle")
            if failed and line["step"] > kept and category not in ("starting", "loading"):
                category = "lost"
            elif category == "training" and line["step"] <= reached:
                category = "repeated"
            seconds[category] += spent
    left = max(0.0, whole - sum(seconds.values()))
    before = lines[0]["time"] - sum(lines[0]["seconds"].values()) - (attempt.joined or attempt.began)
    before = min(max(0.0, before), left)
    steps = lines[-1]["step"] > lines[0]["step"]
    rest = "loading" if not steps else "training" if runs else "lost" if failed else "idle"
    seconds["starting"] += before
    seconds[rest] += left - before
    return seconds


def _saved(lines: Iterable[Line]) -> int:
    """Return the step of the last save, or that of the start."""
    return max(line["step"] for line in lines if line.get("saved") or "start" in line)


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each category, the largest first."""
    whole = sum(seconds.values())
    return {name: seconds[name] / whole for name in sorted(seconds, key=seconds.__getitem__, reverse=True) if whole}


def effective(seconds: Mapping[str, float]) -> float:
    """Return the share of effective time."""
    return sum(shares(seconds).get(name, 0.0) for name in EFFECTIVE)


def text(seconds: Mapping[str, float]) -> str:
    """Return effective time and the shares of all time in one line; empty before there is any."""
    of_all = shares(seconds)
    listed = ", ".join(f"{name} {share:.1%}" for name, share in of_all.items() if share >= LEAST)
    return listed and f"{effective(seconds):.1%} effective: {listed}"
