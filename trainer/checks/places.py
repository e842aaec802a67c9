"""Checks of the paths that a command reads and writes, before it does so; contract/output_marks.py has the rules.

Only folders that this project has written may be replaced, and an output must not overlap an input or another output.
All problems are reported at once, one line for each path.
"""

# pyright: reportArgumentType=false

from collections.abc import Iterator
from pathlib import Path

from conf.rules import objectives
from conf.rules.serving import is_apart
from conf.schema.run import Run
from contract.faults import Fault
from contract.output_marks import (
    BASE,
    DATA,
    EVALUATION,
    EXPORT,
    LOGS,
    PARITY,
    PARTIAL,
    PREPARING,
    REFERENCE,
    REINFORCEMENT,
    TRAINING,
    Kind,
    meetings,
    problems,
)
from trainer.data.read import sources

Inputs = dict[str, list[str | Path]]
Outputs = dict[str, tuple[str | Path, Kind]]

NESTED = (
    ("paths.parity", "paths.output"),
    ("paths.logs", "paths.output"),
    ("paths.logs", "paths.reinforced"),
)  # the first may lie in the second


def check_convert(run: Run) -> None:
    base = run.paths.base
    partial = {"next to paths.base": (f"{base}{PARTIAL}", BASE)}
    _check(_inputs(run, "model"), {"paths.base": (base, BASE), "paths.logs": (run.paths.logs, LOGS)} | partial)


def check_prepare(run: Run) -> None:
    data = run.paths.data
    partial = {"next to paths.data": (f"{data}-preparing", PREPARING)}
    template = {"data.template": [run.data.template]} if run.data.template.endswith(".jinja") else {}
    _check(_inputs(run, "model") | _sources(run) | template, {"paths.data": (data, DATA)} | partial)


def check_train(run: Run) -> None:
    paths = run.paths
    outputs = {"output": (paths.output, TRAINING), "logs": (paths.logs, LOGS), "parity": (paths.parity, PARITY)}
    named = {f"paths.{name}": output for name, output in outputs.items()}
    reference = ("reference",) if objectives.has_reference(run) else ()
    _check(_inputs(run, "model", "base", "data", *reference) | _sources(run), named)


def check_reference(run: Run) -> None:
    paths = run.paths
    outputs = {"paths.reference": (paths.reference, REFERENCE), "paths.logs": (paths.logs, LOGS)}
    scored = ("teacher", "teacher_base") if objectives.has_teacher(run) else ("base",)
    _check(_inputs(run, "model", *scored, "data") | _sources(run), outputs)


def check_reinforce(run: Run) -> None:
    """Check the paths of reinforcement learning. The output of training is an input here."""
    paths = run.paths
    outputs = {"reinforced": (paths.reinforced, REINFORCEMENT), "logs": (paths.logs, LOGS)}
    named = {f"paths.{name}": output for name, output in outputs.items()}
    data = "prompts" if run.reinforce.source else "data"
    trained = ("output",) if run.reinforce.start == "trained" else ()
    _check(_inputs(run, "model", "base", data, *trained) | _sources(run), named)


def check_export(run: Run) -> None:
    export = run.paths.export
    partial = {"next to paths.export": (f"{export}{PARTIAL}", EXPORT)}
    outputs = {"paths.export": (export, EXPORT), "paths.logs": (run.paths.logs, LOGS)}
    _check(_inputs(run, "model", "base", "output"), outputs | partial)


def check_evaluate(run: Run) -> None:
    tasks: Inputs = {"evaluate.tasks": [task for task in run.evaluate.tasks if task.endswith((".yaml", ".yml"))]}
    served = ("model", "export") if run.evaluate.adapter == "unmerged" else ("served",)
    base = ("of_base",) if is_apart(run) else ()
    inputs = _inputs(run, *served, *base, "data", "parity", "kernels") | tasks
    _check(inputs, {"paths.evaluation": (run.paths.evaluation, EVALUATION)})


def _check(inputs: Inputs, outputs: Outputs) -> None:
    lines = [*meetings(inputs, {name: place for name, (place, _) in outputs.items()}, NESTED)]
    overlapping = {name for name, _ in lines}
    lines += [(name, line) for name, out in outputs.items() if name not in overlapping for line in problems(*out)]
    if lines:
        raise Fault("\n".join(f"{name}: {line}" for name, line in lines))


def _inputs(run: Run, *names: str) -> Inputs:
    return {f"paths.{name}": [getattr(run.paths, name)] for name in names}


def _sources(run: Run) -> Inputs:
    """Folders of rows on this disk, and their files, which may be links to other places."""
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
