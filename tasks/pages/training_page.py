"""The page of a running training: its step, speed, remaining time and curves."""

from typing import Any

from contract.amounts import clock
from tasks.pages.markdown import as_of, embedded, table, words

LATEST = 20  # latest steps that give the speed, without the first step and the pause of a resume

Line = dict[str, Any]  # of metrics.jsonl


def headline(lines: list[Line], steps: int) -> str:
    """The training in one line; "" before its first step."""
    trained, validated = _of("train", lines), _of("validation", lines)
    if not trained:
        return ""
    last = trained[-1]
    parts = [f"step {last['step']} of {steps}", f"loss {last['lm_loss']:.4g}"]
    parts += [f"validation {validated[-1]['lm_loss']:.4g}"] if validated else []
    parts += [f"{last['tokens_per_second']:,.0f} tokens/s"]
    return ", ".join(parts) + left(lines, steps)


def left(lines: list[Line], steps: int) -> str:
    """The time to the last step as the end of a line; empty if it is not known."""
    seconds = seconds_left(lines, steps)
    return f", {clock(seconds)} left" if seconds else ""


def seconds_left(lines: list[Line], steps: int) -> float | None:
    """Seconds to the last step, at the speed of the latest steps; None if there are too few."""
    began = max((place for place, line in enumerate(lines) if line["kind"] == "start"), default=0)
    latest = [line for line in lines[began:] if line["kind"] == "train"][-LATEST:]
    if len(latest) < 2 or latest[-1]["step"] <= latest[0]["step"]:
        return None
    each = (latest[-1]["time"] - latest[0]["time"]) / (latest[-1]["step"] - latest[0]["step"])
    return max(0.0, each * (steps - latest[-1]["step"]))


def page(name: str, lines: list[Line], steps: int, image: bytes | None, links: dict[str, str]) -> str:
    """The page in Markdown."""
    trained, validated = _of("train", lines), _of("validation", lines)
    first, last = trained[0], trained[-1]
    lowest = min(trained, key=lambda line: line["lm_loss"])
    rows = [("loss", f"{last['lm_loss']:.4g}", f"{first['lm_loss']:.4g} at first, lowest at step {lowest['step']}")]
    if validated:
        best = min(validated, key=lambda line: line["lm_loss"])
        newest = validated[-1]
        note = f"at step {newest['step']}; lowest {best['lm_loss']:.4g} at step {best['step']}"
        rows.append(("validation", f"{newest['lm_loss']:.4g}", note))
        if "perplexity" in newest:  # trainings of earlier versions did not write it
            rows.append(("perplexity", f"{newest['perplexity']:.4g}", "of the validation data: exp of its loss"))
        if "rewards/accuracy" in newest:
            margin = f"of the held-out rows are ranked correctly; margin {newest['rewards/margin']:.3g}"
            rows.append(("accuracy", f"{newest['rewards/accuracy']:.3g}", margin))
    rows.append(("speed", f"{last['tokens_per_second']:,.0f} tokens/s", f"{last['step_seconds']:.3g} s per step"))
    if last.get("padding"):
        note = "of the positions have no token; they take time and are not counted"
        rows.append(("padding", f"{last['padding']:.0%}", note))
    rows.append(("learning rate", _shown(last.get("lr")), ""))
    rows.append(("gradient norm", _shown(last.get("grad_norm")), "before clipping"))
    if "loss_scale" in last:
        rows.append(("loss scale", f"{last['loss_scale']:g}", f"{last['skipped_steps']} steps skipped"))
    rows.append(("memory", f"{last['memory_gb']:.1f} GB", "highest of any rank"))
    step = f"Step {last['step']} of {steps}{left(lines, steps)}"
    text = head(f"Training of {words(name)}", step, rows, "training", image)
    return "\n".join([*text, *as_of(last["time"], links)]) + "\n"


def head(title: str, step: str, rows: list[tuple[str, str, str]], shows: str, image: bytes | None) -> list[str]:
    """First lines of a page: its title, the step, the figures, and the image, which shows their curves."""
    text = [f"# {title}", "", f"**{step}**", *table(("", "now", ""), rows)]
    return [*text, "", embedded(shows, image)] if image else text


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _of(kind: str, lines: list[Line]) -> list[Line]:
    """Lines of a kind, without skipped steps of fp16, which may have no loss."""
    return [line for line in lines if line["kind"] == kind and line["lm_loss"] is not None]
