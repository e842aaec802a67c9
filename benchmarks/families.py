"""Compare every supported family with transformers, by a tiny model in fp32.

    python -m benchmarks.families [KIND ...] [--steps N] [--workdir FOLDER] [--without-vllm]

The table has a line for each tiny model, with differences:

    converted   logits of the converted model and, by transformers, of the released one, relative to the largest logit
    layouts     LoRA at three layouts: the largest relative difference of a step's loss from that of one process
    merged      logits of the merged export by transformers, compared with the trained model's by Megatron
    adapter     the same for the released model with the exported adapter, by PEFT
    vLLM        log-probabilities of the merged export by vLLM on this host: the largest difference in nats per token

Progress is reported on stderr. --workdir keeps the figures of each model whose figures are all within their bounds. The
next call with the same steps and packages reuses them, so an interrupted call continues with the next model.

Ends with one line of JSON; exit code 1 if a figure is above its bound. A minute or more for each model on 2 cores.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import layouts, logits
from benchmarks.layouts import Case
from conf.model_facts import facts_from_hf
from conf.rules.serving import unservable
from conf.schema.run import Run
from contract import checkpoints, closed_pipe, json_object, output_marks
from contract.faults import Fault
from contract.files import write_atomically
from trainer import export
from trainer.megatron.recipe import checkpoint_folder
from trainer.rehearsal import forked_ranks, tiny_models
from trainer.startup import entry

BOUND = 1e-4
NATS = 1e-3  # as in trainer/serving/agreement.py
COLUMNS = {"converted": BOUND, "layouts": BOUND, "merged": BOUND, "adapter": BOUND, "vLLM": NATS}
ROWS, LENGTH = 2, 48
PACKAGES = ("megatron-bridge", "megatron-core", "torch", "transformers", "peft", "vllm")
KEPT = "figures.json"  # in a model's folder
Row = dict[str, float | str]


def main() -> None:
    options = _arguments()
    with contextlib.ExitStack() as stack:
        folder = options.workdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="families-")))
        with entry.faults_in_one_line():
            output_marks.take(folder, layouts.FOLDER)
            forked_ranks.import_all()
            print(f"{'family':14}" + "".join(f"{name:>11}" for name in COLUMNS) + "  layouts", flush=True)
            found = {kind: _try(kind, folder / kind, options) for kind in options.kinds or tiny_models.KINDS}
    above = [f"{kind} {name}" for kind, row in found.items() for name, value in row.items() if missed(name, value)]
    print(json.dumps({"command": "families", "bounds": COLUMNS, "missed": above, "families": found}))
    sys.exit(1 if above else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = [*tiny_models.KINDS]
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)}; all, unless told")
    parser.add_argument("--steps", type=int, default=10, help="training steps per layout (default 10)")
    parser.add_argument("--workdir", type=Path, help="keep models, exports and logs here")
    parser.add_argument("--without-vllm", action="store_true", help="leave the last column out")
    options = parser.parse_args()
    if strange := [kind for kind in options.kinds if kind not in kinds]:
        parser.error(f"there is no tiny model {', '.join(strange)}; there are {', '.join(kinds)}")
    if options.steps < 1:
        parser.error(f"--steps: {options.steps} is too small: it must be at least 1")
    return options


def cases(kind: str) -> list[Case]:
    """Return the layouts for a family: the first three of benchmarks/layouts.py."""
    return [case for case in layouts.TABLE if case.model == kind and not case.flags()][:3]


def _try(kind: str, folder: Path, options: argparse.Namespace) -> Row:
    """Measure one model in its own folder, or return the figures that are kept there."""
    asked = {"steps": options.steps, "vllm": not options.without_vllm} | {
        package: importlib.metadata.version(package) for package in PACKAGES
    }
    row, note = kept(folder / KEPT, asked), "  kept"
    if not row:
        output_marks.remove(folder, layouts.FOLDER)
        output_marks.take(folder, layouts.FOLDER)
        row, note = dict.fromkeys(COLUMNS, math.nan) | _figures(kind, folder, options), ""
        if not any(missed(name, value) for name, value in row.items()):
            write_atomically(folder / KEPT, json.dumps({"asked": asked, "row": row}), durable=False)
    cells = [f"{value:.1e}" if isinstance(value, float) else "none" for value in (row[name] for name in COLUMNS)]
    cuts = "; ".join(case.cut.replace("=true", "").replace("=", "") for case in cases(kind))
    why = "".join(f"; {name}: {value}" for name, value in row.items() if isinstance(value, str))
    print(f"{kind:14}" + "".join(f"{cell:>11}" for cell in cells) + f"  {cuts}{why}{note}", flush=True)
    return row


def kept(file: Path, asked: dict) -> Row:
    """Return the figures that an earlier call with the same arguments has kept; empty if there are none."""
    try:
        found = json_object.read(file)
    except (OSError, ValueError, Fault):
        return {}
    return found["row"] if found.get("asked") == asked else {}


def _tell(kind: str, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {kind}: {what}", file=sys.stderr, flush=True)


def _figures(kind: str, folder: Path, options: argparse.Namespace) -> Row:
    import torch

    _tell(kind, "converts, and trains on one process")
    layouts.prepare(kind, False, folder)
    alone = Case(kind, "")
    run = _with_export(layouts.configured(alone, folder, options.steps), folder / f"{kind}-export")
    rng = random.Random(0)
    rows = [
        [rng.randrange(5, facts_from_hf(tiny_models.KINDS[kind]).vocab) for _ in range(LENGTH)] for _ in range(ROWS)
    ]
    model, out = Path(run.paths.model), folder / f"{kind}-logits"
    out.mkdir(exist_ok=True)

    def ask(name: str, checkpoint: Path | None) -> torch.Tensor | None:
        command = partial(logits.of_megatron, checkpoint=checkpoint, rows=rows, out=out / f"{name}.pt")
        code = forked_ranks.call(command, run, out / f"{name}.log")
        return None if code else torch.load(out / f"{name}.pt")

    found: Row = {}
    expected, apart = layouts.losses(alone, folder, options.steps), []
    for case in cases(kind):
        _tell(kind, f"trains at {case.name.removeprefix(kind).strip()}")
        apart.append(_apart(layouts.losses(case, folder, options.steps), expected))
    found["layouts"] = max(apart)
    _tell(kind, "exports, and asks Megatron and transformers for logits")
    if forked_ranks.call(export.main, run, folder / f"{kind}-export.log"):
        return found
    at = checkpoints.step_folder(checkpoint_folder(run), options.steps)
    base, trained, exported = ask("base", None), ask("trained", at), Path(run.paths.export)
    asked = [(model, None), (exported / "merged", None), (model, exported / "adapter")]
    beside = zip(("converted", "merged", "adapter"), (base, trained, trained), strict=True)
    for (name, megatrons), theirs in zip(beside, logits.by_transformers(asked, rows), strict=True):
        found[name] = _difference(megatrons, theirs)
    found["vLLM"] = _by_vllm(kind, run, rows, trained, options.without_vllm)
    return found


def _with_export(run: Run, folder: Path) -> Run:
    kernels = folder.parents[1] / "kernels"  # of all models
    paths = {"export": str(folder), "served": str(folder / "merged"), "kernels": str(kernels)}
    return run.model_copy(update={"paths": run.paths.model_copy(update=paths)})


def _by_vllm(kind: str, run: Run, rows: list[list[int]], trained, left_out: bool) -> float | str:
    if left_out or trained is None:
        return "not asked"
    if reasons := unservable(run, facts_from_hf(tiny_models.KINDS[kind]), cpu=True):
        return reasons[0]
    import torch

    _tell(kind, "asks vLLM")
    tokens = torch.tensor(rows)[:, 1:, None]
    expected = trained.log_softmax(-1)[:, :-1].gather(-1, tokens)[..., 0]
    answer = logits.by_vllm(run, rows)
    if isinstance(answer, str):
        print(f"vLLM, {kind}: {answer}", file=sys.stderr)
        return math.nan
    return float((torch.tensor(answer) - expected).abs().max())


def _difference(found, expected) -> float:
    """Return the largest difference between logits of Megatron and transformers, or the text of an error."""
    if isinstance(expected, str):
        print(expected, file=sys.stderr)
    if found is None or isinstance(expected, str):
        return math.nan
    return float(abs(found.numpy() - expected).max() / abs(expected).max())


def _apart(found: list[float], expected: list[float]) -> float:
    if len(found) != len(expected) or not expected:
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def missed(name: str, value: float | str) -> bool:
    return not isinstance(value, str) and not value <= COLUMNS[name]


if __name__ == "__main__":
    with closed_pipe.quiet():
        main()
