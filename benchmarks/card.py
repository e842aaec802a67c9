"""Verification card of a configuration: measured figures next to planned ones, and commands for further checks.

    python -m benchmarks.card qwen3-30b-a3b-1xh100                  a trial on this host's GPUs, then its card
    python -m benchmarks.card glm47 --layers 6 layout.nodes=1 ...   for a model with fewer layers
    python -m benchmarks.card qwen3-30b-a3b-1xh100 --answer FILE    from the output of `python -m trainer.trial --json`
    python -m benchmarks.card qwen3-30b-a3b-1xh100 --planned        only the plan, without a GPU

The card is Markdown, on stdout and in runs/cards/NAME.md: commands, commit, hardware, packages; step time, tokens/s and
TFLOP/s per GPU, their share of a matrix product measured right after, memory of the fullest rank, each planned and
measured. Without a GPU the card has only the plan, and says so. Coverage of weights, parity with serving, and a resume
need a complete run: the card names the command for each check, but does not claim that it passed.

Exit code 0: the card is written; 1: the trial failed or ran out of memory, and the card says so; 2: the arguments are
wrong.
"""

# pyright: reportArgumentType=false

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import measured
from benchmarks.study.measured import How
from benchmarks.study.rows import Row
from conf.host import nvidia_smi
from conf.load import load
from conf.planner import hardware
from conf.planner.verdict import Plan, facts_of, plan, settle
from contract import closed_pipe, json_object
from contract.faults import Fault
from contract.files import write_atomically
from flows.arguments import refused
from tasks.run import launch
from tasks.run.places import runs_folder

GB, WARM = 1e9, 2
OF_A_RUN = {
    "coverage": "each weight of the release has its place, and each place its weight: else the stage convert fails",
    "parity": "nats a token between training and what is served, beside evaluate.parity_bound: the run's page",
    "resume": "the steps after a kill, on the undisturbed run's losses: make faults N=1",
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    try:
        run = load(options.conf, options.overrides)
        gpu = hardware.of(run)
        planned = plan(settle(run, facts_of(run), gpu), facts_of(run), gpu)
        row = Row("card", Path(options.conf).stem, options.conf, tuple(options.overrides))
        answer = _answer(row, options)
        text = "\n".join(lines(row, options, planned, answer)) + "\n"
        folder = (options.to or runs_folder() / "cards").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{row.name}.md", text, durable=False)
    except Fault as fault:
        return refused(fault)
    print(text, end="")
    return 1 if answer and not answer.get("ranks") else 0


def _answer(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the output of a trial: from the given file, or of a trial that runs now if there is a GPU."""
    if options.answer:
        found = json_object.read(options.answer)
        if "ranks" not in found:
            raise Fault(f"--answer: {options.answer} is no answer of python -m trainer.trial ... --json")
        return found
    if options.planned or not nvidia_smi.kind():
        return None
    folder = runs_folder() / "cards" / "trials"
    return measured.measure(folder, row, How(options.steps, options.layers, within=options.within))


def lines(row: Row, options: argparse.Namespace, planned: Plan, answer: dict[str, Any] | None) -> Iterator[str]:
    keys = " ".join(map(shlex.quote, row.overrides))
    cut = f" --layers {options.layers}" if options.layers else ""
    run = planned.run
    yield f"# {row.name}"
    yield ""
    yield f"    python -m benchmarks.card {row.configuration}{cut} {keys}".rstrip()
    yield f"    python -m trainer.trial {row.configuration}{cut} {keys}".rstrip()
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| commit | {_commit()} |"
    yield f"| asked for | {run.world} {run.hardware.gpu} |"
    device = f"{len(answer['ranks'])} x {answer['device']}" if answer and answer.get("ranks") else "nothing"
    yield f"| measured on | {device} |"
    versions = {name: one for name, one in measured.versions().items() if name != "device"}
    yield f"| packages | {', '.join(f'{name} {one}' for name, one in versions.items())} |"
    yield ""
    if answer and "failed" in answer:
        yield f"The trial has failed: {answer['failed']}"
    elif answer and not answer["ranks"]:
        yield "The trial ran out of memory."
    elif answer:
        yield from _beside(answer)
    else:
        yield "Planned alone: nothing was measured, as no GPU was there, or asked for."
        yield ""
        yield from _plan(planned)
    yield ""
    yield "| of a whole run, and not in this card | what shows it |"
    yield "|---|---|"
    yield from (f"| {name} | {how} |" for name, how in OF_A_RUN.items())


def _beside(answer: dict[str, Any]) -> Iterator[str]:
    """Return the step time of the slowest rank and the memory of the fullest rank, measured and planned."""
    ranks = answer["ranks"]
    seconds = max(statistics.median(rank["seconds"][WARM - 1 :]) for rank in ranks)
    expected = max(rank["planned"].get("seconds", 0.0) for rank in ranks)
    tokens = answer["tokens"] / len(ranks)
    yield f"{answer['layers']} of {answer['of_layers']} layers, {answer['steps']} steps, weights and tokens drawn."
    yield ""
    yield "| | measured | planned | measured / planned |"
    yield "|---|---|---|---|"
    yield _row("ms a step", seconds * 1e3, expected * 1e3)
    yield _row("tokens/s/GPU", tokens / seconds, tokens / expected if expected else 0.0)
    if "tflops" in answer:
        yield _row("TFLOP/s/GPU", answer["tflops"], answer["tflops"] * seconds / expected if expected else 0.0)
        share = f"{answer['share_of_product']:.0%} of {answer['product_tflops']:.0f}"
        yield f"| of a matrix product right after | {share} | | |"
    for key in ("allocated", "device"):
        sizes = [max(rank[kind].get(key, 0.0) for rank in ranks) / GB for kind in ("measured", "planned")]
        if sizes[0]:
            yield _row(f"GB {'allocated' if key == 'allocated' else 'of the device'}", *sizes)
    losses = next((rank["losses"] for rank in reversed(ranks) if rank["losses"]), [])
    yield f"| losses | {', '.join(f'{loss:.4f}' for loss in losses)} | | |"


def _plan(planned: Plan) -> Iterator[str]:
    yield "| | planned |"
    yield "|---|---|"
    if planned.problems:
        yield f"| refused | {'; '.join(planned.problems)} |"
        return
    if time := planned.time:
        yield f"| ms a step | {time.likely * 1e3:,.0f} |"
        yield f"| tokens/s/GPU | {time.tokens_per_second:,.0f} |"
        yield f"| TFLOP/s/GPU | {time.tflops:,.0f} |"
    yield f"| GB of the device | {planned.fullest.total / GB:.1f} of {planned.gpu.memory / GB:.1f} |"


def _row(name: str, found: float, expected: float) -> str:
    shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in (found, expected)]
    ratio = f"{found / expected:.2f}" if expected else ""
    return f"| {name} | {shown[0]} | {shown[1] if expected else ''} | {ratio} |"


def _commit() -> str:
    """Return the commit of the code, and whether files have changed since."""
    told = [
        subprocess.run(["git", "-C", launch.ROOT, *arguments], capture_output=True, text=True)
        for arguments in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    if told[0].returncode:
        return "none: the code is no checkout"
    return told[0].stdout.strip() + (", changed" if told[1].stdout.strip() else "")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conf", help="a name in conf/, or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as layout.nodes=1 layout.ep=8")
    parser.add_argument("--steps", type=int, default=8, metavar="S", help="of the trial, the first two to warm up (8)")
    parser.add_argument("--layers", type=int, metavar="K", help="of the model that are kept; else all")
    parser.add_argument("--answer", type=Path, metavar="FILE", help="what a trial has said, instead of a new one")
    parser.add_argument("--planned", action="store_true", help="the plan alone, also where a GPU is")
    parser.add_argument(
        "--within", type=float, default=600.0, metavar="S", help="seconds that the trial may take (600)"
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="of the card (runs/cards)")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    with closed_pipe.quiet():
        sys.exit(main())
