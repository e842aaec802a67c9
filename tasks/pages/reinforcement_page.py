"""The page of a running reinforcement learning: rewards of answers, and signs of problems."""

from typing import Any

from tasks.pages import training_page
from tasks.pages.markdown import as_of, code, table, words

SHOWN = 4  # answers of the last step
PARTS = ("transfer", "probe", "generate", "reward", "train")
ASYNCHRONOUS = ("transfer", "probe", "wait", "train")  # if answers are generated and rewarded during training

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
    step = f"Step {last['step'] // updates} of {steps}{training_page.left(lines, steps * updates)}"
    title, figures = f"Reinforcement learning of {words(name)}", _figures(finished, updates)
    text = training_page.head(title, step, figures, "rewards", image)
    cells = [
        (*(code(sample[key]) for key in ("prompt", "answer", "reference")), f"{sample['reward']:.3g}")
        for sample in samples[-SHOWN:]
    ]
    text += table(("prompt", "answer", "right", "reward"), cells)
    text += as_of(last["time"], links)
    return "\n".join(text) + "\n"


def _figures(lines: list[Line], updates: int) -> list[tuple[str, str, str]]:
    first, last = lines[0], lines[-1]
    best = max(lines, key=lambda line: line["reward"])
    worst = max(line["mismatch"] for line in lines)
    note = f"{first['reward']:.3f} at first, highest {best['reward']:.3f} at step {best['step'] // updates}"
    rows = [
        ("reward", f"{last['reward']:.3f}", note),
        ("best answer of a group", f"{last['reward_best']:.3f}", f"{first['reward_best']:.3f} at first"),
        ("groups with signal", f"{last['groups_with_signal']:.0%}", "groups whose answers have different rewards"),
        ("mismatch", f"{last['mismatch']:.1e}", f"nats per token, vLLM and trainer; highest {worst:.1e}"),
        ("entropy", f"{last['entropy']:.3f}", f"{first['entropy']:.3f} at first"),
        ("length", f"{last['length']:.1f} tokens", f"longest {last['length_max']}, {last['truncated']:.0%} cut off"),
    ]
    if "gradient_signal" in last:
        note = f"deviations from noise; steps have {last['step_length']:.0%} of their length"
        rows.append(("signal of gradients", f"{last['gradient_signal']:.1f}", note))
    if "seconds_wait" in last:
        rows.append(("version lag", f"{last['version_lag']:g}", "steps since the weights that generated the answers"))
        rows.append(("answers, during training", *_seconds(last, ("generate", "reward"))))
        return [*rows, ("seconds", *_seconds(last, ASYNCHRONOUS))]
    return [*rows, ("seconds", *_seconds(last, PARTS))]


def _seconds(line: Line, parts: tuple[str, ...]) -> tuple[str, str]:
    """Seconds of these parts of a step in total, and of each."""
    seconds = {part: line[f"seconds_{part}"] for part in parts if f"seconds_{part}" in line}
    return f"{sum(seconds.values()):.3g}", ", ".join(f"{part} {value:.2g}" for part, value in seconds.items())


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "reinforce"]
