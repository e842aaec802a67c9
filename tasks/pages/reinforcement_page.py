"""The page of a running reinforcement learning: rewards of answers, and signs of problems."""

from typing import Any

from tasks.pages import training_page
from tasks.pages.markdown import as_of, embedded, render

SHOWN = 4  # answers of the last step

Line = dict[str, Any]  # of metrics.jsonl, or of samples.jsonl


def headline(lines: list[Line], steps: int, updates: int) -> str:
    """The learning in one line; "" before its first step. `updates` is the number of updates of a step."""
    finished = _steps(lines)
    if not finished:
        return ""
    last = finished[-1]
    parts = [f"step {last['step'] // updates} of {steps}", f"reward {last['reward']:.3f}"]
    parts += [f"mismatch {last['mismatch']:.1e}", f"length {last['length']:.1f}"]
    return ", ".join(parts) + training_page.left(lines, steps * updates)


def page(
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
        """Seconds of these parts of the last step in total, and of each."""
        each = {part: last[f"seconds_{part}"] for part in parts if f"seconds_{part}" in last}
        return f"{sum(each.values()):.3g} | {', '.join(f'{part} {value:.2g}' for part, value in each.items())}"

    return render(
        "reinforcement",
        name=name,
        steps=steps,
        updates=updates,
        left=training_page.left(lines, steps * updates),
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
