"""Print memory, time and price of each stage of a run, and whether it fits. No GPU, network or weights are needed.

    python -m flows.plan glm47                                   is it legal? does it fit? time and price
    python -m flows.plan glm47 layout.etp=1 --gpu h200 --price 3.5
    python -m flows.plan glm47 --gpus 64 --gpu b200              layouts of 64 GPUs, fastest first
    python -m flows.plan path/to/my.yaml --gpu my-gpu.yaml --json
    python -m flows.plan glm47 --rehearse --steps 2              Megatron builds it, and takes steps of a small copy

NAME is a file, or a name in conf/ or conf/documented/. --gpu and --price override hardware.gpu and hardware.price;
layout.auto=true takes the fastest layout that fits.
Exit code 0: legal, fits and can be evaluated. 1: refused. 2: an error in the call, or a model that cannot be converted
(its plan is printed all the same).
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf import noise
from conf.load import dump, load
from conf.model_facts import ModelFacts
from conf.model_files import weights
from conf.planner import display, hardware
from conf.planner.cheapest import with_cheapest
from conf.planner.hardware import GB, Gpu
from conf.planner.search import Found, search
from conf.planner.verdict import NothingFits, compared, config_of, facts_of, plan, settle, settled_on, teacher_of
from conf.rules import objectives, schedule
from conf.rules.conversion import obstacles, unwritable
from conf.schema.run import Run
from conf.schema.sections import MOST
from contract import closed_pipe
from contract.faults import ConfigError
from flows import arguments
from flows.arguments import refused
from tasks.run import launch
from tasks.run.launch import Broken
from tasks.sources import adapters, training_rows

REASONS = 12  # shown; --json has all


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.plan().parse_intermixed_args(argv)
    _check(options)
    given = {"hardware.gpu": options.gpu, "hardware.price": options.price}
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    run = load(options.conf, [*options.overrides, *overrides], illegal=True)
    gpu, facts, teacher = hardware.of(run, options.gpus), facts_of(run), teacher_of(run)
    cannot = _obstacles(run)
    adapters.check(run, config_of(run)[0])
    assumed = ""
    if run.train.epochs is not None:
        sequences, assumed = training_rows.sequences(run)
        run = schedule.assumed(run, sequences)
    if run.layout.gpus_per_node > gpu.joined:
        text = f"{run.layout.gpus_per_node}, but one host of {gpu.name} has {gpu.per_host}"
        raise ConfigError(f"layout.gpus_per_node: {text}; --gpu takes a .yaml of another")
    if options.gpus is not None:
        return _told(cannot, _search(run, facts, gpu, options.gpus, options))
    asked = run
    try:
        run = settle(run, facts, gpu, teacher)
    except NothingFits:
        return _told(cannot, _search(run, facts, settled_on(run, gpu), run.world, options))
    rows = training_rows.asked(run) if objectives.has_reference(run) else None
    few = noise.warning(run, training_rows.held_out(run))
    planned = compared(replace(plan(run, facts, gpu, teacher, rows), assumed=assumed, noise=few))
    planned = with_cheapest(planned, asked, teacher)
    shown, text = display.as_dict(planned), list(display.lines(planned))
    passed = planned.fits and not (planned.unserved or planned.unanswered or planned.unasked)
    if options.rehearse:
        answer = rehearse(run, options.steps)
        shown["rehearsal"] = answer
        text += ["", "rehearsed with Megatron itself:", *answer["text"]]
        passed = passed and answer["equal"] and not (answer["twin"] and answer["twin"]["failed"])
    if cannot:
        shown["obstacles"] = cannot
        text.append("also refused: the model cannot be converted; the plan is for a copy that can be")
    print(json.dumps(shown, indent=2) if options.json else "\n".join(text))
    return _told(cannot, 0 if passed else 1)


def rehearse(run: Run, steps: int) -> dict[str, Any]:
    """Return Megatron's verdict on the layout, from trainer/rehearse.py in a separate process.

    Raises a Fault for an error of the user, and Broken if the command itself fails.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        resolved = Path(name) / "run.yaml"
        dump(run, resolved)
        command = ["trainer.rehearse", str(resolved), "--json", "--steps", str(steps)]
        try:
            launch.process(command, Path(name) / "rehearse.log", said.append, stop=lambda: False)
        except Broken:
            if "}" not in said:  # with an answer, the exit code only means that Megatron disagrees
                raise
    return json.loads("\n".join(said[said.index("{") : said.index("}") + 1]))


def _obstacles(run: Run) -> list[str]:
    """List the reasons why the model cannot be converted."""
    found = obstacles(config_of(run)[0], run.model.ignore_config)
    if not found and (refused := unwritable(config_of(run)[0], run.export)):
        return [refused]
    if isinstance(run.model.source, str) and (folder := Path(run.model.source).expanduser()).is_dir():
        weights.require_headers(folder)
    of_model = [f"model.source: {run.model.source}: {line}" for line in found]
    if not objectives.has_teacher(run):
        return of_model
    config, _ = config_of(objectives.at_teacher(objectives.of_teacher(run)), "train.teacher")
    return of_model + [
        f"train.teacher: {run.train.teacher}: {line}" for line in obstacles(config, run.model.ignore_config)
    ]


def _told(cannot: list[str], code: int) -> int:
    return refused(ConfigError(*cannot)) if cannot else code


def _check(options: argparse.Namespace) -> None:
    wrong = []
    if options.gpus is not None and not 1 <= options.gpus <= MOST:
        wrong.append(f"--gpus: {options.gpus} is not a number of GPUs from 1 to {MOST}")
    if options.top < 1:
        wrong.append(f"--top: {options.top} is too small: it must be at least 1")
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        wrong.append(f"--price: {options.price:g} is no price in USD per GPU and hour; it must be at least 0")
    if options.steps < 0 or (options.steps and not options.rehearse):
        wrong.append(f"--steps: {options.steps}: from 0, and of --rehearse")
    if options.rehearse and options.gpus is not None:
        wrong.append("--rehearse: is of one layout, and --gpus of many")
    if wrong:
        raise ConfigError(*wrong)


def _search(run: Run, facts: ModelFacts, gpu: Gpu, gpus: int, options: argparse.Namespace) -> int:
    found = search(run, facts, gpu, gpus)
    if options.json:
        head = {"name": run.name, "model": str(run.model.source), "gpu": gpu.name, "gpu_memory": gpu.memory}
        whole = {**head, "gpus": gpus, **display.found_dict(found, found.fitting[: options.top], gpu)}
        print(json.dumps(whole, indent=2))
    else:
        print("\n".join(_table(run, gpu, gpus, found, options.top)))
    return 0 if found.fitting else 1


def _table(run: Run, gpu: Gpu, gpus: int, found: Found, top: int) -> Iterator[str]:
    yield f"{run.name}: {run.model.source} on {gpus} {gpu.name} ({gpu.memory / GB:.1f} GB each)"
    if found.fitting:
        yield f"{len(found.fitting)} layouts are legal and fit; seconds of a step, memory of the fullest GPU:"
        yield from display.ranking(found.fitting[:top], gpu)
    else:
        yield from display.suggestions(found, gpus, gpu)
    if found.fitting:
        yield f"{found.reasons.total()} others are illegal or do not fit; --json names the reasons"
        return
    yield f"{found.reasons.total()} fail:"
    yield from (f"{count:>6}  {reason}" for reason, count in found.reasons.most_common(REASONS))
    if (rest := len(found.reasons) - REASONS) > 0:
        yield f"        and {rest} rarer reasons, which --json names"


if __name__ == "__main__":
    closed_pipe.run(main)
