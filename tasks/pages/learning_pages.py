"""Pages of a running training and of reinforcement learning: step, speed, remaining time, figures and curves."""

from typing import Any

from contract.amounts import clock
from tasks.pages.markdown import as_of, embedded, render

LATEST = 20  # latest steps that give the speed, without the first step and the pause of a resume
SHOWN = 4  # answers of the last step

Line = dict[str, Any]  # of metrics.jsonl, or of samples.jsonl


def training_headline(lines: list[Line], steps: int) -> str:
    """Return the state of training in one line; "" before its first step."""
    trained, validated = _of("train", lines), _of("validation", lines)
    if not trained:
        return ""
    last = trained[-1]
    parts = [f"step {last['step']} of {steps}", f"loss {last['lm_loss']:.4g}"]
    parts += [f"validation {validated[-1]['lm_loss']:.4g}"] if validated else []
    parts += [f"{last['tokens_per_second']:,.0f} tokens/s"]
    return ", ".join(parts) + left(lines, steps)


def left(lines: list[Line], steps: int) -> str:
    """Return the time to the last step as the end of a line; "" if it is unknown."""
    seconds = seconds_left(lines, steps)
    return f", {clock(seconds)} left" if seconds else ""


def seconds_left(lines: list[Line], steps: int) -> float | None:
    """Return the seconds to the last step, at the speed of the latest steps; None if there are too few steps."""
    began = max((place for place, line in enumerate(lines) if line["kind"] == "start"), default=0)
    latest = [line for line in lines[began:] if line["kind"] == "train"][-LATEST:]
    if len(latest) < 2 or latest[-1]["step"] <= latest[0]["step"]:
        return None
    each = (latest[-1]["time"] - latest[0]["time"]) / (latest[-1]["step"] - latest[0]["step"])
    return max(0.0, each * (steps - latest[-1]["step"]))


def training(
    name: str, lines: list[Line], steps: int, image: bytes | None, links: dict[str, str], spent: str = ""
) -> str:
    """The page in Markdown. `spent` is the share of each category of time."""
    trained, validated = _of("train", lines), _of("validation", lines)
    return render(
        "training",
        name=name,
        steps=steps,
        left=left(lines, steps),
        first=trained[0],
        last=trained[-1],
        lowest=min(trained, key=_loss),
        newest=validated[-1] if validated else None,
        best=min(validated, key=_loss, default=None),
        image=image and embedded("training", image),
        spent=spent,
        end="\n".join(as_of(trained[-1]["time"], links)),
    )


def _loss(line: Line) -> float:
    return line["lm_loss"]


def _of(kind: str, lines: list[Line]) -> list[Line]:
    """Return the lines of a kind, without skipped steps of fp16, which may have no loss."""
    return [line for line in lines if line["kind"] == kind and line["lm_loss"] is not None]


def reinforcement_headline(lines: list[Line], steps: int, updates: int) -> str:
    """Return the state of learning in one line; "" before its first step. `updates` is updates per step."""
    finished = _steps(lines)
    if not finished:
        return ""
    last = finished[-1]
    parts = [f"step {last['step'] // updates} of {steps}", f"reward {last['reward']:.3f}"]
    parts += [f"mismatch {last['mismatch']:.1e}", f"length {last['length']:.1f}"]
    return ", ".join(parts) + left(lines, steps * updates)


def reinforcement(
    name: str,
    lines: list[Line],
    samples: list[Line],
    steps: int,
    updates: int,
    image: bytes | None,
    links: dict[str, str],
) -> str:
    """The page in Markdown."""
    finished = _steps(lines)
    last = finished[-1]

    def seconds(*parts: str) -> str:
        """Return the seconds of these parts of the last step, in total and for each part."""
        each = {part: last[f"seconds_{part}"] for part in parts if f"seconds_{part}" in last}
        return f"{sum(each.values()):.3g} | {', '.join(f'{part} {value:.2g}' for part, value in each.items())}"

    return render(
        "reinforcement",
        name=name,
        steps=steps,
        updates=updates,
        left=left(lines, steps * updates),
        first=finished[0],
        last=last,
        best=max(finished, key=lambda line: line["reward"]),
        worst=max(line["mismatch"] for line in finished),
        seconds=seconds,
        samples=samples[-SHOWN:],
        image=image and embedded("rewards", image),
        end="\n".join(as_of(last["time"], links)),
    )


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "reinforce"]
