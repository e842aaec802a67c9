"""Parsers of the commands in flows/. They import nothing heavy, so that help and completion are fast.

A parser has the name of its command. Its description is the docstring of the module that does the work.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import math
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.faults import Broken, Fault, line_of

HOST, PORT = "127.0.0.1", 8000
MODEL = "org/name on the Hub, a folder, or s3://..."
DATA = "a file, a folder, org/name on the Hub, or s3://..."
MACHINE = "such as 8xh100, 1xa100, 2x8xh200 (hosts x GPUs), 1xmy-gpu.yaml or cpu"
# Subcommands of finetune, each with its module and the module's first word.
_MODULES = ("new", "adopt", "plan", "pretrain", "serve", "logs", "artifacts", "costs", "gang", "deploy", "doctor")
COMMANDS = {name: f"flows.{name}" for name in _MODULES}
COMMANDS.update(run="flows.finetune", study="benchmarks.study", up="flows.services up", down="flows.services down")
invoked_as = "python -m"  # flows/__main__.py sets "finetune": then help and advice name `finetune plan`


def spoken(text: str) -> str:
    """Return the text. If this process was started as `finetune`, `python -m flows.plan` becomes `finetune plan`."""
    if invoked_as == "finetune":
        for name, words in COMMANDS.items():
            text = re.sub(rf"python -m {words}\b", f"finetune {name}", text)
    return text


def about(module: str) -> str:
    """Return the docstring of a command's module without importing the module."""
    file = Path(__file__).parents[1] / module.replace(".", "/")
    file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


def stages() -> list[str]:
    """Return the names of the stages in flows/pipeline.py without importing it."""
    tree = ast.parse((Path(__file__).parent / "pipeline.py").read_text("utf-8"))
    steps = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Step")
    return [ast.literal_eval(step.args[0]) for step in steps]


def of_command(module: str) -> argparse.ArgumentParser:
    """Return the parser of a command: a function of this file, or of arguments.py in the command's folder."""
    folder, _, name = module.rpartition(".")
    return pkgutil.resolve_name(f"{folder if folder == 'flows' else module}.arguments:{name}")()


def parser(module: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=spoken(f"python -m {module}"),
        usage=argparse.SUPPRESS,  # an error is one line, without the usage
        description=spoken(about(module)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def of_a_run(
    module: str, example: str, names: str = "a name in conf/", required: bool = True
) -> argparse.ArgumentParser:
    """Make a parser for NAME [KEY=VALUE ...]; parse_intermixed_args allows options in any position."""
    made = parser(module)
    optional = {} if required else {"nargs": "?"}
    made.add_argument("conf", metavar="NAME", help=f"{names}, or a YAML file", **optional)
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=f"such as {example}")
    return made


def finetune(module: str = "flows.finetune") -> argparse.ArgumentParser:
    made = of_a_run(module, example="optimizer.lr=2e-4", required=False)
    made.epilog = (
        f"Stages, in order: {', '.join(stages())}. FINETUNE_STORE names the store (s3://bucket/prefix or a folder), "
        "FINETUNE_RUNS the local folder for work and caches (runs), MLFLOW_TRACKING_URI the tracking server."
    )
    made.add_argument("--until-stage", metavar="STAGE", help="end after this stage")
    made.add_argument("--from-stage", metavar="STAGE", help="run this stage and all later ones again")
    made.add_argument("--dry-run", action="store_true", help="list stages, cached or not, and cost; run nothing")
    return made


def pretrain() -> argparse.ArgumentParser:
    return finetune("flows.pretrain")


def plan() -> argparse.ArgumentParser:
    from conf.planner import hardware

    made = of_a_run("flows.plan", example="layout.ep=16", names="a name in conf/ or its folders")
    made.add_argument("--gpu", metavar="KIND", help=f"{', '.join(hardware.NAMES)}, or a .yaml file")
    made.add_argument("--gpus", metavar="N", type=int, help="search the layouts of N GPUs")
    made.add_argument("--price", metavar="USD", type=float, help="price per GPU and hour")
    made.add_argument("--top", metavar="N", type=int, default=10, help="layouts to show with --gpus (10)")
    made.add_argument("--rehearse", action="store_true", help="let Megatron build the layout too, without memory: 10 s")
    made.add_argument("--steps", metavar="N", type=int, default=0, help="with --rehearse: steps of a small copy")
    made.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return made


def new() -> argparse.ArgumentParser:
    made = parser("flows.new")
    made.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    made.add_argument("data", metavar="DATA", nargs="?", help=DATA)
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as data.input=ticket or adapter.rank=32")
    made.add_argument("--gpus", metavar="GPUS", help=f"{MACHINE}; by default those of this host")
    made.add_argument("--name", metavar="NAME", help="write conf/own/NAME.yaml; a path to a .yaml file is not deployed")
    made.add_argument("--yes", action="store_true", help="ask nothing")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.add_argument("--print", action="store_true", help="print the file and write nothing; also --dry-run")
    made.add_argument("--dry-run", dest="print", action="store_true", help=argparse.SUPPRESS)
    return made


def adopt() -> argparse.ArgumentParser:
    made = parser("flows.adopt")
    made.add_argument("file", metavar="FILE", help="a YAML or JSON file, a shell or Python script, or a page")
    made.add_argument("--from", dest="stack", metavar="NAME", help="the stack, such as axolotl, trl or megatron-lm")
    made.add_argument("--out", metavar="FILE", help="write our configuration to this .yaml file instead of stdout")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.add_argument("--gpus", metavar="N", type=int, help="GPUs of a host, if the file does not name them")
    made.add_argument("--pick", metavar="N", type=int, help="the N-th configuration of the file (1)")
    made.add_argument("--no-plan", dest="plan", action="store_false", help="print no verdict of the plan")
    return made


def serve() -> argparse.ArgumentParser:
    made = parser("flows.serve")
    names = "a registered model, NAME@VERSION, export/FINGERPRINT, or a run; after `load` or `unload`: of an adapter"
    made.add_argument("names", metavar="NAME", nargs="+", help=names)
    made.add_argument("--host", default=HOST, help=f"address to listen at ({HOST})")
    made.add_argument("--port", type=int, default=PORT, help=f"port to listen at ({PORT})")
    made.add_argument("--adapter", action="store_true", help="serve the released model with the adapter, not merged")
    made.add_argument("--adapters", metavar="N", type=int, default=0, help="the same, with memory for N adapters")
    made.add_argument("--length", type=int, help="tokens of a question and its answer (as many as memory holds)")
    made.add_argument("--check", action="store_true", help="repeat the evaluation's questions, compare answers, end")
    return made


def logs() -> argparse.ArgumentParser:
    made = parser("flows.logs")
    made.add_argument("gang", metavar="GANG", nargs="?", help="train-FINGERPRINT or its beginning, or a run's name")
    made.add_argument("--attempt", metavar="N", type=int, help="attempt (default: the newest)")
    of = made.add_mutually_exclusive_group()
    of.add_argument("--rank", metavar="R", type=int, help="rank (default: 0)")
    of.add_argument("--host", metavar="NAME", help="all ranks of this host")
    of.add_argument("--torchrun", action="store_true", help="output of torchrun on each host")
    made.add_argument("--err", action="store_true", help="stderr instead of stdout")
    made.add_argument("--tail", metavar="N", type=int, help="only the last N lines of each log")
    made.add_argument("--follow", action="store_true", help="print new lines until the gang ends")
    return made


def artifacts() -> argparse.ArgumentParser:
    made = parser("flows.artifacts")
    commands = made.add_subparsers(dest="do", required=True, prog=made.prog)
    listed = commands.add_parser("list", help="all artifacts")
    listed.add_argument("stage", nargs="?", help="only those of this stage")
    listed.add_argument("--owner", help="only those that runs of this owner refer to")
    listed.add_argument("--project", help="only those that runs of this project refer to")
    commands.add_parser("show", help="one artifact's record and lineage").add_argument("key")
    verified = "only these; also compare a base (convert) or an export with the release"
    commands.add_parser("verify", help="read every byte").add_argument("keys", nargs="*", metavar="key", help=verified)
    gc = commands.add_parser("gc", help="list or delete artifacts that no run needs")
    gc.add_argument("--days", type=_days, help="ignore your runs that started more than DAYS days ago")
    gc.add_argument("--all-owners", action="store_true", help="with --days, ignore old runs of other owners too")
    gc.add_argument("--delete", action="store_true", help="delete them; the default only lists them")
    return made


def costs() -> argparse.ArgumentParser:
    made = parser("flows.costs")
    made.add_argument("--month", type=_month, help="such as 2026-11 (default: this month, UTC)")
    made.add_argument("--project", help="only this project")
    made.add_argument("--owner", help="only this owner")
    return made


def _month(text: str) -> str:
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text):
        raise argparse.ArgumentTypeError(f"{text}: not a month, such as 2026-11")
    return text


def _days(text: str) -> float:
    with contextlib.suppress(ValueError):
        days = float(text)
        if 0 <= days < math.inf:
            return days
    raise argparse.ArgumentTypeError(f"{text}: not a number of days (0 or more)")


def gang() -> argparse.ArgumentParser:
    from conf.schema.named import LAUNCHERS, submitting

    made = of_a_run("flows.gang", example="slurm.partition=h100")
    made.add_argument("--engine", choices=[*submitting(), *LAUNCHERS], help="use this instead of gang.engine")
    made.add_argument(
        "--stage", choices=("train", "reinforce"), default="train", help="the stage that uses the hosts (train)"
    )
    return made


def deploy() -> argparse.ArgumentParser:
    made = parser("flows.deploy")
    made.add_argument("names", nargs="*", metavar="NAME", help="a deployment (default: all)")
    made.add_argument("--image", metavar="REGISTRY/NAME", help="build and push an image for each Kubernetes work pool")
    return made


def doctor() -> argparse.ArgumentParser:
    made = parser("flows.doctor")
    made.add_argument("--extra", choices=("cpu", "gpu"), help="packages to expect (default: gpu if this host has one)")
    made.add_argument("--json", action="store_true", help="print JSON, for programs")
    return made


def services() -> argparse.ArgumentParser:
    made = parser("flows.services")
    made.add_argument("do", choices=("up", "down", "status"))
    return made


def refused(fault: object, code: int = 2) -> int:
    """Print an error and return the exit code, by default 2: an error that the caller can fix."""
    print("".join(f"error: {line}\n" for line in spoken(str(fault)).splitlines()), end="", file=sys.stderr)
    return code


def reports_faults(main: Callable[..., int]) -> Callable[..., int]:
    """Make a command print its errors: those of the user or of the host (such as a full disk) with exit code 2.

    A failed command that it has started has exit code 1. Other exceptions are raised.
    """

    @functools.wraps(main)
    def run(*args: Any, **options: Any) -> int:
        try:
            return main(*args, **options)
        except Broken as broken:
            return refused(broken, code=1)
        except (Fault, OSError) as error:
            line = line_of(error)
            if line is None:
                raise
            return refused(line)

    return run
