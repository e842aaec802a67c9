"""Effective time of a gang's training with faults, by the product's own account (tasks/gang/history/spent.py)."""

from pathlib import Path

from tasks.gang.history import spent, timeline

EXACT = 0.01  # of the wall time, for the sum of the seconds by category


def seconds(work: Path, gpus: int) -> dict[str, float]:
    """Seconds of the training in this folder so far, by category."""
    return spent.of(timeline.attempts(work), spent.read(work / "files"), gpus).seconds


def since(before: dict[str, float], after: dict[str, float], wall: float, least: float) -> tuple[str, list[str]]:
    """Return the share of effective time and the seconds by category as a line, and a list of errors.

    It is an error if the share is below `least`, or if the seconds do not add up to the wall time.
    """
    spent_now = {name: after[name] - before[name] for name in after}
    counted, effective = sum(spent_now.values()), sum(spent_now[name] for name in spent.EFFECTIVE) / wall
    wrong = [f"categories sum to {counted:.1f} s of {wall:.1f} s"] * (abs(counted - wall) > EXACT * wall)
    wrong += [f"{effective:.1%} effective"] * (effective < least)
    listed = ", ".join(f"{name} {value:.1f}" for name, value in spent_now.items())
    return f"{effective:.1%} effective of {wall:.1f} s; categories sum to {counted:.1f} s: {listed}", wrong
