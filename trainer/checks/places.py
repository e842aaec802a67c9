"""Checks of the paths that a command will read and write; contract/output_marks.py has the rules.

Only folders that this project has written may be replaced, and an output must not overlap an input or another output.
All problems are reported at once, one line for each path.
"""

# pyright: reportArgumentType=false

from collections.abc import Iterator
from pathlib import Path

from conf.rules import objectives
from conf.rules.serving import is_apart
from conf.schema.run import Run
from contract import output_marks as marks
from contract.faults import Fault
from trainer.data.read import sources

Inputs = dict[str, list[str | Path]]
Outputs = dict[str, tuple[str | Path, marks.Kind]]

# The first may lie in the second.
NESTED = (("paths.parity", "paths.output"), ("paths.logs", "paths.output"), ("paths.logs", "paths.reinforced"))


def check_convert(run: Run) -> None:
    partial = {"next to paths.base": (f"{run.paths.base}{marks.PARTIAL}", marks.BASE)}
    _check(_inputs(run, "model"), _outputs(run, base=marks.BASE, logs=marks.LOGS) | partial)


def check_prepare(run: Run) -> None:
    partial = {"next to paths.data": (f"{run.paths.data}-preparing", marks.PREPARING)}
    template = {"data.template": [run.data.template]} if run.data.template.endswith(".jinja") else {}
    _check(_inputs(run, "model") | _sources(run) | template, _outputs(run, data=marks.DATA) | partial)


def check_train(run: Run) -> None:
    reference = ("reference",) if objectives.has_reference(run) else ()
    outputs = _outputs(run, output=marks.TRAINING, logs=marks.LOGS, parity=marks.PARITY)
    _check(_inputs(run, "model", "base", "data", *reference) | _sources(run), outputs)


def check_reference(run: Run) -> None:
    scored = ("teacher", "teacher_base") if objectives.has_teacher(run) else ("base",)
    outputs = _outputs(run, reference=marks.REFERENCE, logs=marks.LOGS)
    _check(_inputs(run, "model", *scored, "data") | _sources(run), outputs)


def check_reinforce(run: Run) -> None:
    """Check the paths of reinforcement learning. The output of training is an input here."""
    data = "prompts" if run.reinforce.source else "data"
    trained = ("output",) if run.reinforce.start == "trained" else ()
    outputs = _outputs(run, reinforced=marks.REINFORCEMENT, logs=marks.LOGS)
    _check(_inputs(run, "model", "base", data, *trained) | _sources(run), outputs)


def check_export(run: Run) -> None:
    partial = {"next to paths.export": (f"{run.paths.export}{marks.PARTIAL}", marks.EXPORT)}
    outputs = _outputs(run, export=marks.EXPORT, logs=marks.LOGS) | partial
    _check(_inputs(run, "model", "base", "output"), outputs)


def check_evaluate(run: Run) -> None:
    tasks: Inputs = {"evaluate.tasks": [task for task in run.evaluate.tasks if task.endswith((".yaml", ".yml"))]}
    served = ("served",) if run.evaluate.adapter == "merged" else ("model", "export")
    base = ("of_base",) if is_apart(run) else ()
    inputs = _inputs(run, *served, *base, "data", "parity", "kernels") | tasks
    _check(inputs, _outputs(run, evaluation=marks.EVALUATION))


def _check(inputs: Inputs, outputs: Outputs) -> None:
    lines = [*marks.meetings(inputs, {name: place for name, (place, _) in outputs.items()}, NESTED)]
    overlapping = {name for name, _ in lines}
    lines += [(name, line) for name, out in outputs.items() if name not in overlapping for line in marks.problems(*out)]
    if lines:
        raise Fault("\n".join(f"{name}: {line}" for name, line in lines))


def _inputs(run: Run, *names: str) -> Inputs:
    return {f"paths.{name}": [getattr(run.paths, name)] for name in names}


def _outputs(run: Run, **kinds: marks.Kind) -> Outputs:
    return {f"paths.{name}": (getattr(run.paths, name), kind) for name, kind in kinds.items()}


def _sources(run: Run) -> Inputs:
    """Return the folders of rows on this disk, and their files, which may be links to other places."""
    return {name: [*_of_source(source)] for name, source in _named(run) if sources.is_local(source)}


def _named(run: Run) -> Iterator[tuple[str, str]]:
    for number, part in enumerate(run.data.parts):
        if part.source:
            yield (f"data.mixture[{number}].source" if run.data.mixture else "data.source"), part.source


def _of_source(source: str) -> Iterator[str | Path]:
    path = Path(source).expanduser()
    if path.exists():
        yield path
    try:
        yield from sources.files(source)
    except Fault:  # preparation reports it
        return
