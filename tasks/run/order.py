"""The stages of a run, in order, and which of them are asked for."""

from conf.schema.run import Run

ORDER = ("download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote")
OF_EVALUATION = ("evaluate-base", "evaluate-tuned", "promote")


def asked(run: Run, last: str | None) -> list[str]:
    """Up to the last one; without evaluate.tasks nothing is evaluated, and nothing says what to promote."""
    upto = ORDER[: ORDER.index(last) + 1] if last else ORDER
    return [name for name in upto if run.evaluate.tasks or name not in OF_EVALUATION]
