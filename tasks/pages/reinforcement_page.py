"""The page of a reinforcement learning that is under way: what answers are worth, and whether they can be trusted."""

from typing import Any

from contract.amounts import clock
from tasks.pages import training_page
from tasks.pages.markdown import as_of, code, embedded, table, words

SHOWN = 4  # answers of the last step
PARTS = ("transfer", "probe", "generate", "reward", "train")
BESIDE = ("transfer", "probe", "wait", "train")  # where answers are made meanwhile, and rewarded

Line = dict[str, Any]  # of metrics.jsonl, or of samples.jsonl


def headline(lines: list[Line], steps: int, updates: int) -> str:
    """The learning in one line; "" before its first step. A step has so many updates."""
    found = _steps(lines)
    if not found:
        return ""
    last = found[-1]
    told = [f"step {last['step'] // updates} of {steps}", f"reward {last['reward']:.3f}"]
    told += [f"mismatch {last['mismatch']:.1e}", f"length {last['length']:.1f}"]
    left = training_page.seconds_left(lines, steps * updates)
    return ", ".join(told + ([f"{clock(left)} left"] if left else []))


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
    found = _steps(lines)
    last = found[-1]
    left = training_page.seconds_left(lines, steps * updates)
    rest = f", {clock(left)} left" if left else ""
    text = [f"# Reinforcement learning of {words(name)}", "", f"**Step {last['step'] // updates} of {steps}{rest}**"]
    text += table(("", "now", ""), _figures(found, updates))
    if image:
        text += ["", embedded("rewards", image)]
    shown = samples[-SHOWN:]
    cells = [
        (code(one["prompt"]), code(one["answer"]), code(one["reference"]), f"{one['reward']:.3g}") for one in shown
    ]
    text += table(("prompt", "answer", "right", "reward"), cells)
    text += as_of(last["time"], links)
    return "\n".join(text) + "\n"


def _figures(found: list[Line], updates: int) -> list[tuple[str, str, str]]:
    first, last = found[0], found[-1]
    best = max(found, key=lambda line: line["reward"])
    worst = max(line["mismatch"] for line in found)
    said = f"{first['reward']:.3f} at first, highest {best['reward']:.3f} at step {best['step'] // updates}"
    rows = [
        ("reward", f"{last['reward']:.3f}", said),
        ("best answer of a group", f"{last['reward_best']:.3f}", f"{first['reward_best']:.3f} at first"),
        ("groups with signal", f"{last['groups_with_signal']:.0%}", "answers that differ in what they are worth"),
        ("mismatch", f"{last['mismatch']:.1e}", f"nats a token, vLLM and trainer; highest {worst:.1e}"),
        ("entropy", f"{last['entropy']:.3f}", f"{first['entropy']:.3f} at first"),
        ("length", f"{last['length']:.1f} tokens", f"longest {last['length_max']}, {last['truncated']:.0%} cut off"),
    ]
    if "gradient_signal" in last:
        said = f"deviations from noise; steps have {last['step_length']:.0%} of their length"
        rows.append(("signal of gradients", f"{last['gradient_signal']:.1f}", said))
    if "seconds_wait" in last:
        rows.append(("version lag", f"{last['version_lag']:g}", "steps taken since the weights that answered"))
        rows.append(("answers, beside training", *_seconds(last, ("generate", "reward"))))
        return [*rows, ("seconds", *_seconds(last, BESIDE))]
    return [*rows, ("seconds", *_seconds(last, PARTS))]


def _seconds(line: Line, parts: tuple[str, ...]) -> tuple[str, str]:
    """Seconds of some parts of a step together, and of each."""
    found = {part: line[f"seconds_{part}"] for part in parts if f"seconds_{part}" in line}
    return f"{sum(found.values()):.3g}", ", ".join(f"{part} {value:.2g}" for part, value in found.items())


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "reinforce"]
