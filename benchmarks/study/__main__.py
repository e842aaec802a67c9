"""Measure several layouts of a configuration and compare them in one report.

    python -m benchmarks.study gpt2-large --gpus 2 --profile             the lists of conf/studies/gpt2-large.yaml
    python -m benchmarks.study qwen3-8b-1xh100 --gpus 4 --layers 8       the planner's fastest layouts, with 8 layers
    python -m benchmarks.study tiny --gpus 2                             small models on a CPU
    python -m benchmarks.study tiny --row 'TP2: layout.gpus_per_node=2 layout.tp=2' --row 'DP2: layout.gpus_per_node=2'
    python -m benchmarks.study gpt2-large --report                       the report again, from earlier measurements

Each layout takes a few steps with python -m trainer.trial: random weights and tokens, no download. --gpus N measures
layouts of N GPUs, and of one for comparison. Measurements of the same configuration, code and device are kept. A layout
that fails is a row of the report, and the next call tries it again.

FOLDER (runs/study/NAME) gets study.html and study.json; with --track MLflow gets a run for each layout.
Exit code 0: all were measured. 1: some failed. 2: an error in the arguments.
"""

# pyright: reportArgumentType=false

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.study import arguments, figures, measured, page, rows
from benchmarks.study.measured import How
from benchmarks.study.rows import Row
from conf.host import nvidia_smi
from conf.planner import parameters
from conf.planner.verdict import facts_of
from conf.schema.run import Run
from contract import closed_pipe
from contract.amounts import clock
from contract.faults import Fault
from contract.files import write_atomically
from flows.arguments import reports_faults
from tasks import tracking
from tasks.run.places import runs_folder

PAGE, RESULT = "study.html", "study.json"
FOR_A_CPU = 100e6  # weights
WARM = 2  # steps of a trial that are not measured
TRACKED = (  # names in MLflow, equal to those of a training's curves if such curves exist
    ("ms", "study/ms_a_step"),
    ("planned_ms", "study/planned_ms"),
    ("of_planned_ms", "study/times_of_planned"),
    ("tokens_per_second_per_gpu", "speed/tokens_per_second_per_gpu"),
    ("tflops", "speed/tflops"),
    ("product_tflops", "study/product_tflops"),
    ("share_of_product", "study/share_of_product"),
    ("gb", "study/gb_of_the_fullest"),
    ("planned_gb", "study/planned_gb"),
)
LOSS = "loss/training"
SHARES = ("computing", "exposed", "hidden", "idle")


@reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.study().parse_intermixed_args(argv)
    how = How(options.steps, options.layers, options.profile, options.within)
    _check(options)
    chosen, lists = _chosen(options)
    if not options.report:
        _check_size(chosen[0].run(), options.layers)
    folder = (options.to or runs_folder() / "study" / Path(options.conf).stem).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    experiment = chosen[0].run().track.experiment
    answers = _answers(folder, chosen, how, options)
    report = {"name": Path(options.conf).stem, "made": time.strftime("%Y-%m-%d %H:%M"), "lists": lists}
    report |= {"versions": _versions(answers), "rows": [_told(*pair, how) for pair in answers]}
    write_atomically(folder / RESULT, json.dumps(report), durable=False)
    write_atomically(folder / PAGE, page.of(report, folder), durable=False)
    print("\n".join(table(report["rows"])))
    if options.track:
        print(track(runs_folder(), experiment, report, [folder / RESULT, folder / PAGE]))
    print(f"study: {folder / PAGE}")
    return 1 if any("failed" in row["figures"] for row in report["rows"]) else 0


def _check(options: argparse.Namespace) -> None:
    if options.gpus < 1:
        raise Fault(f"--gpus: {options.gpus} is not a number of GPUs")
    if options.steps <= WARM:
        raise Fault(f"--steps: {options.steps}: the first {WARM} are not measured")
    if options.layers is not None and options.layers < 1:
        raise Fault(f"--layers: {options.layers} is not a number of layers")
    there = len(nvidia_smi.visible())
    if there and options.gpus > there and not options.report:
        raise Fault(f"--gpus: {options.gpus}, but this host has {there}")


def _check_size(run: Run, layers: int | None) -> None:
    """Raise a Fault for a model that would take hours on this host without a GPU."""
    facts = facts_of(run)
    size = parameters.total(facts) * min(1, (layers or facts.layers) / facts.layers)
    if size > FOR_A_CPU and not nvidia_smi.kind():
        text = f"of {size / 1e6:,.0f} M weights, and this host has no GPU; make study SHORT=1 takes a tiny one"
        raise Fault(f"model.source: {run.model.source}: {text}")


def _chosen(options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Return the selected rows, and the description of each of their lists."""
    if options.row:
        found, lists = rows.given(options.conf, options.row), {}
    else:
        found, lists = rows.listed(options.conf)
        if not found:
            return rows.found(options.conf, options.overrides, options.gpus), {}
    if unknown := {*options.list} - {*lists}:
        raise Fault(f"--list: {unknown.pop()}: {options.conf} has {', '.join(lists) or 'none'}")
    found = [row.changed(options.overrides) for row in found if row.of in (options.list or [row.of])]
    if not options.row:
        sizes = {row: row.gpus for row in found}
        if options.gpus not in sizes.values():
            known = ", ".join(map(str, sorted({*sizes.values()})))
            raise Fault(f"--gpus: {options.gpus}: {options.conf} has layouts of {known}")
        found = [row for row, gpus in sizes.items() if gpus in (1, options.gpus)]
    if unknown := {*options.only} - {row.name for row in found}:
        raise Fault(f"--only: {unknown.pop()}: there are {', '.join(dict.fromkeys(row.name for row in found))}")
    found = [row for row in found if row.name in (options.only or [row.name])]
    return found, {of: lists[of] for of in dict.fromkeys(row.of for row in found) if of in lists}


def _answers(
    folder: Path, chosen: list[Row], how: How, options: argparse.Namespace
) -> list[tuple[Row, dict[str, Any]]]:
    """Return the results of all rows, stored or measured now, and print a line for each."""
    began, took, found = time.monotonic(), [], []
    for place, row in enumerate(chosen):
        head = f"[{place + 1}/{len(chosen)}] {row.title}"
        answer = None if options.again else measured.kept(folder, row, None if options.report else how)
        said = "kept"
        late = options.minutes is not None and time.monotonic() - began > options.minutes * 60
        if answer is None and (options.report or late):
            answer, said = {"failed": "not measured yet" if options.report else "not begun: --minutes were over"}, ""
        if answer is None:
            left = f", about {clock(sum(took) / len(took) * (len(chosen) - place))} left" if took else ""
            print(f"{head}: {' '.join(row.overrides)}{left}", flush=True)
            start = time.monotonic()
            answer = measured.measure(folder, row, how)
            took.append(time.monotonic() - start)
            said = f"{took[-1]:.0f} s"
        found.append((row, answer))
        print(f"{head}: {_line(figures.of(answer))}{f' ({said})' if said else ''}", flush=True)
    return found


def _line(one: dict[str, Any]) -> str:
    if "failed" in one:
        return one["failed"][:300]
    speed = f"{one['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, {one['tflops']:.4g} TFLOP/s/GPU"
    return f"{one['ms']:,.1f} ms, {speed}, {one['share_of_product']:.1%} of a product, {one['gb']:.2f} GB"


def _versions(answers: Sequence[tuple[Row, dict[str, Any]]]) -> dict[str, str]:
    """Return all versions of each package with which the rows were measured."""
    found: dict[str, dict[str, None]] = {}
    for name, value in (pair for _, answer in answers for pair in answer.get("versions", {}).items()):
        found.setdefault(name, {})[value] = None
    return {name: " and ".join(values) for name, values in found.items()}


def _told(row: Row, answer: dict[str, Any], how: How) -> dict[str, Any]:
    command = ["python", "-m", *measured.command(row, how, Path("profile"))]
    return {
        "title": row.title,
        "list": row.of,
        "name": row.name,
        "configuration": row.configuration,
        "overrides": list(row.overrides),
        "documented_ms": row.documented_ms,
        "command": shlex.join(command),
        "figures": figures.of(answer),
    }


def table(told: Sequence[dict[str, Any]]) -> list[str]:
    lines = figures.table(told)
    whole = [line for line, row in zip(lines[1:], told, strict=True) if "failed" not in row["figures"]]
    widths = [max(map(len, column)) for column in zip(lines[0], *whole, strict=True)]
    widths[0] = max(len(line[0]) for line in lines)
    return [_aligned(line, widths) for line in lines]


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """A line of the table. A failed layout has fewer cells."""
    numbers = [cell[:120].rjust(width) for cell, width in zip(line[1:], widths[1:], strict=False)]
    return "  ".join([line[0].ljust(widths[0]), *numbers])


def track(runs: Path, experiment: str, report: dict[str, Any], files: Sequence[Path]) -> str:
    """Hand the report's rows to a process that sends them to MLflow, and return a line about it for the user."""
    if find_spec("mlflow") is None:
        return "tracking: MLflow is not installed here; run --report on a host that has it, with this folder"
    name, now = report["name"], time.strftime("%Y%m%d-%H%M%S")
    whole = tracking.start(runs, None, experiment, f"study-{name}-{now}", f"study {name}", tags={"study": name})
    for row in report["rows"]:
        if "failed" not in row["figures"]:
            _track_row(whole, row, {"study": name, **report["versions"]})
    for file in files:
        whole.file(file, file.name)
    whole.end()
    whole.close()
    return f"tracking: experiment {experiment} gets a run for each layout, and study {name} with this report"


def _track_row(whole: tracking.Tracking, row: dict[str, Any], tags: dict[str, str]) -> None:
    figures = row["figures"]
    params = dict(text.split("=", 1) for text in row["overrides"]) | {"configuration": row["configuration"]}
    stage = whole.stage(row["title"], tags=tags, params=params)
    stage.metrics({name: figures[key] for key, name in TRACKED})
    if "time" in figures:
        stage.metrics({f"study/{share}": figures["time"][share] for share in SHARES})
    for step, loss in enumerate(figures["losses"], 1):
        stage.metrics({LOSS: loss}, step)
    stage.end()


if __name__ == "__main__":
    closed_pipe.run(main)
