"""Order of the stages of a run, and which of them are asked for."""

from conf.schema.run import Run

ORDER = ("download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote")
OF_EVALUATION = ("evaluate-base", "evaluate-tuned", "promote")


def asked(run: Run, last: str | None) -> list[str]:
    """Stages up to the last one. Without evaluate.tasks nothing is evaluated, and so nothing can be promoted."""
    upto = ORDER[: ORDER.index(last) + 1] if last else ORDER
    return [name for name in upto if run.evaluate.tasks or name not in OF_EVALUATION]
