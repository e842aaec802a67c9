"""Take a few real steps of a run's layout on this machine, and compare time and memory with the plan.

    python -m trainer.trial CONF [--steps N] [--layers K] [--rows TOKENS] [--gpu KIND] [--profile] [--json]
        [key=value ...]
    python -m trainer.trial CONF --best N [--steps N] [--layers K] [--rows TOKENS] [--gpu KIND] [--json]
        [key=value ...]

    python -m trainer.trial glm47 --layers 6 layout.nodes=1 layout.gpus_per_node=1 layout.tp=1 layout.sp=false \\
        layout.pp=1 layout.vpp=null layout.ep=1 train.global_batch=4

A trial takes about twelve minutes, before a large run costs money. It uses one host and the run's recipe and kernels,
and downloads nothing.
The model is cut to K layers with the whole model's share of dense layers, and all its MTP layers. Weights and tokens
are random, and tokens are routed evenly. The plan is for the cut model (conf/planner/). A ratio of 1 means that the
plan of the whole model is credible for this kind of layer and GPU. The step time is the median after the first two
steps. Without --gpu the plan is for the GPU of this machine, if it is known.

With --profile one more step is recorded by torch's profiler, after another that is discarded. A report shows the
activity of GPUs and host in it (trainer/profiling/), and --profile-to names the folder for its page, its figures as
JSON, and every rank's trace.

With --best N the configuration's own layout and the N fastest layouts that the plan finds for as many GPUs are tried,
and the keys of the fastest one are printed. Each takes about a minute; runs/best-CONF-TIME.json has the figures so far.

Ranks start in the same environment as in training (conf/network.py); variables that are already set take precedence.

Exit code 0: measured. 1: out of memory, which is also a result, or a defect; with --best, every trial failed. 2: the
arguments are wrong.

Not covered: several hosts; rows of unequal length; on a CPU, everything but the sizes of states.
"""

# pyright: reportArgumentType=false

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf import families
from conf.host import gpu_locks, nvidia_smi
from conf.load import dump, load
from conf.model_facts import ModelFacts, facts_from_hf, first_layers
from conf.planner import hardware, verdict
from conf.planner.hardware import GPUS, Gpu, by_device, read
from conf.planner.memory import memory
from conf.planner.timing import Timing, timing
from conf.rules import objectives, schedule
from conf.rules.gpus import takes
from conf.rules.layout import grid, packing_multiple, problems
from conf.schema.run import Run
from contract import closed_pipe
from contract.faults import Fault, named
from contract.installation import runs_folder
from contract.processes import end_with_parent
from trainer.data.preparation import MANIFEST
from trainer.data.write import sequences_file
from trainer.measure import EXHAUSTED, RESULT
from trainer.profiling import recorder, report
from trainer.rehearsal import best_layouts
from trainer.startup import entry

WARM = 2  # steps in which kernels are chosen, states are allocated, and the allocator sees all sizes
RECORDING = 2  # further warm-up steps until the graphs of train.cuda_graphs exist
RECORDED = 2  # steps that --profile adds: one in which the profiler starts, and the recorded one
STATES = ("weights", "adapters", "gradients", "optimizer")


def main() -> int:
    options = _arguments()
    with entry.faults_in_one_line():
        configured = load(options.conf, options.overrides, illegal=True)
        if options.steps <= warm(configured):
            raise Fault(f"--steps: {options.steps}, but the first {warm(configured)} are not measured")
        config, place = verdict.config_of(configured)
        whole = verdict.facts_in(config, place)
        run = verdict.settle(configured, whole, hardware.of(configured))
        if options.best is not None:
            return _best(options, configured, run, whole)
        if options.layers is not None:
            config = cut(config, options.layers)
        facts = facts_from_hf(config)
        if found := problems(run, facts):
            raise Fault("\n".join(found))
        if options.rows and not run.data.packed:
            raise Fault("--rows: only for packed rows, but data.packed is false")
        if options.rows and (options.rows > run.data.seq_length or options.rows % packing_multiple(run.layout)):
            most, unit = run.data.seq_length, packing_multiple(run.layout)
            raise Fault(f"--rows: {options.rows} is not a multiple of {unit} up to data.seq_length, {most}")
        gpu = read(options.gpu) if options.gpu else None
        keeps = _profile_folder(options) if options.profile else None
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            settled = settle(run, config, options.steps, Path(folder), bool(keeps), options.rows)
            purpose = f"trial of {run.name}, started by hand"
            hold = gpu_locks.take(purpose, _to_stderr, count=takes(settled, "train").gpus) or gpu_locks.Hold()
            with contextlib.closing(hold):
                code, ranks, exhausted = _measure(settled, Path(folder), hold.environment)
            for rank in ranks:
                rank["seconds"] = rank["seconds"][: options.steps - 1]  # recorded steps take longer
            profile = _profiled(settled, facts, ranks, keeps) if keeps and ranks else None
    if not ranks and not exhausted:
        return code
    gpu = gpu or by_device(ranks[0]["device"] if ranks else "")
    answer = compare(settled, facts, gpu, ranks) | {"layers": facts.layers, "of_layers": whole.layers}
    answer |= {"steps": options.steps, "out_of_memory": exhausted}
    text = [*lines(answer), *(report.lines(profile) if profile else ())]
    answer |= {"profile": profile} if profile else {}
    print(json.dumps(answer) if options.json else "\n".join(text))
    return 0 if ranks else 1


def _best(options: argparse.Namespace, configured: Run, run: Run, facts: ModelFacts) -> int:
    """Try the best plans, and print the fastest. A file has the results so far."""
    if options.profile:
        raise Fault("--best: takes no --profile; profile the layout that it names")
    gpu = read(options.gpu) if options.gpu else by_device(nvidia_smi.kind() or "") or hardware.of(run)
    more = ["--steps", str(options.steps), *(["--gpu", options.gpu] if options.gpu else [])]
    more += ["--layers", str(options.layers)] if options.layers is not None else []
    more += ["--rows", str(options.rows)] if options.rows is not None else []
    candidates = best_layouts.candidates(configured, run, facts, gpu, options.best)
    file = _place("best", options).with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    _to_stderr(f"{len(candidates)} trials; {file} has the results so far; ms of a step / planned = ratio")
    rows: list[best_layouts.Row] = []
    for candidate in candidates:
        rows.append(best_layouts.measured(candidate, options.conf, options.overrides, more))
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        _to_stderr(f"{len(rows)} of {len(candidates)}  {best_layouts.line(rows[-1])}")
    fastest = best_layouts.verdict(rows, options.conf, options.overrides)
    print(json.dumps([asdict(row) for row in rows]) if options.json else fastest)
    return 0 if any(row.seconds is not None for row in rows) else 1


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Cut the model's config.json to this many layers, with every kind of layer."""
    facts = facts_from_hf(config)
    if not 1 <= layers <= facts.layers:
        raise Fault(f"--layers: {layers} is not between 1 and {facts.layers}")
    shorter = first_layers(config, layers)
    if facts.experts and facts.dense_layers:
        share = round(facts.dense_layers * layers / facts.layers)
        shorter["first_k_dense_replace"] = min(layers - 1, max(1, share))
    if facts.dense_too:
        shorter["mlp_only_layers"] = [layer for layer in facts.dense_too if layer < layers]
    with named(f"--layers {layers}", ValueError):  # such as multi-token prediction without any experts
        kinds = facts_from_hf(shorter).kinds
    if missing := {*facts.kinds} - {*kinds}:
        raise Fault(f"--layers: {layers} leaves no {missing.pop()} layer of {facts.layers}")
    return shorter


def settle(
    run: Run, config: dict[str, Any], steps: int, folder: Path, profiled: bool = False, rows: int | None = None
) -> Run:
    """Return the run to measure, with model, tokens and results in this folder."""
    steps += RECORDED if profiled else 0
    names = ("model", "base", "data", "output", "logs", "export")
    facts = facts_from_hf(config)
    settled = schedule.of_steps(objectives.as_sft(run), steps).changed(
        paths={name: str(folder / name) for name in names},
        moe={"force_balance": bool(facts.experts)},
        log={"profile_every": steps if profiled else None},
    )
    for name in names:
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(families.as_text(config)))
    write_tokens(settled, facts.vocab, rows or run.data.seq_length)
    return settled


@dataclass(frozen=True)
class RandomRows:
    """Rows of random tokens."""

    lengths: np.ndarray
    vocab: int

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.Generator(np.random.PCG64(int(rows[0])))
        ids = random.integers(0, self.vocab, int(self.lengths[rows].sum()), np.int32)
        return ids, np.ones(len(ids), bool)


def write_tokens(run: Run, vocab: int, length: int) -> None:
    """Write prepared data for one step, which training repeats: sequences full of rows of this length."""
    each, place = run.data.seq_length // length, Path(run.paths.data)
    rows = run.train.global_batch * each
    source = RandomRows(np.full(rows, length + 1), vocab)  # and the last label
    file = place / "training.idx.parquet"
    sequences_file.write(file, source, np.arange(rows), np.arange(0, rows + 1, each), pad_to=None, pad_id=0)
    manifest = {"kind": "sft", "files": {}, "settings": {}, "sources": [], "tokenizer": ""}
    for key, count in (("rows", rows), ("sequences", run.train.global_batch)):
        manifest[key] = {"training": count, "validation": 0, "test": 0}
    manifest |= {"vocab_size": vocab, "pad_id": 0}
    (place / MANIFEST).write_text(json.dumps(manifest))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(
    run: Run, folder: Path, environment: dict[str, str]
) -> tuple[int, list[dict[str, Any]], dict[str, Any] | None]:
    """Return the exit code, the measurements of every rank, and the record of a rank that ran out of memory."""
    dump(run, folder / "run.yaml")
    command = [sys.executable, "-m", "trainer.measure", str(folder / "run.yaml")]
    code = subprocess.run(command, env=os.environ | environment, preexec_fn=end_with_parent).returncode
    files = (Path(run.paths.output) / name for name in (RESULT, EXHAUSTED))
    ranks, exhausted = (json.loads(file.read_text()) if file.exists() else None for file in files)
    return (min(code, 2) if code >= 0 else 128 - code), ranks or [], exhausted


def _profile_folder(options: argparse.Namespace) -> Path:
    """Create the folder for the profile; it must be new or empty, because other profiles would mix with it."""
    folder = Path(options.profile_to or _place("profile", options)).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Fault(f"--profile-to: {folder} exists and is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _place(what: str, options: argparse.Namespace) -> Path:
    """Return the default path of a result: in the folder of runs, by configuration and time."""
    return runs_folder() / f"{what}-{Path(options.conf).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _profiled(run: Run, facts: ModelFacts, ranks: list[dict[str, Any]], keeps: Path) -> dict[str, Any]:
    """Move the traces to the folder, and report on them."""
    for file in recorder.folder_of(run, run.train.steps).glob(report.TRACE.format("*")):
        shutil.move(file, keeps)
    each = facts.layers / run.layout.pp * grid(run.layout, run.train).microbatches
    measured = [_seconds(run, rank) for rank in ranks]
    usual = statistics.median(max(seconds) for seconds in zip(*measured, strict=False))
    return report.report(keeps, {"name": run.name, "seconds": usual, "layers_times_microbatches": each})


def compare(run: Run, facts: ModelFacts, gpu: Gpu | None, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return planned and measured seconds of a step, and bytes, of every rank."""
    assumed, rows = gpu or GPUS["h200"], []
    stages, time = memory(run, facts, assumed), timing(run, facts, assumed)
    for rank in range(run.world):
        stage = stages[rank * run.layout.pp // run.world]
        planned: dict[str, float] = {key: getattr(stage, key) for key in STATES}
        if gpu:
            planned |= {"allocated": stage.allocated, "reserved": stage.allocated + stage.margin}
            planned |= {"device": stage.total, "seconds": time.likely}
        figures = ranks[rank] if ranks else {}
        measured = {key: figures[key] for key in (*STATES, "host_states") if figures}
        if figures:
            measured["seconds"] = statistics.median(_seconds(run, figures))
        if figures and figures["device"] != "cpu":
            measured |= {"allocated": figures["peak"], "reserved": figures["reserved"], "device": figures["used"]}
            measured |= {"resting": figures["resting"]}
        ratios = {key: measured[key] / planned[key] for key in measured if planned.get(key)}
        row: dict[str, Any] = {"rank": rank, "stage": stage.rank, "planned": planned, "measured": measured}
        row |= {"ratio": ratios, "parts": stage.items}
        rows.append(row | {key: figures.get(key, []) for key in ("seconds", "losses")})
    answer = {"name": run.name, "device": ranks[0]["device"] if ranks else "", "gpu": gpu.name if gpu else None}
    answer |= {"tokens": run.train.global_batch * run.data.seq_length, "bubble": time.bubble, "ranks": rows}
    return answer | (_speed(run, time, ranks) if ranks else {})


def warm(run: Run) -> int:
    """Return the number of first steps that are not measured."""
    return WARM + RECORDING * run.train.cuda_graphs


def _seconds(run: Run, rank: dict[str, Any]) -> list[float]:
    """Return the seconds of the measured steps; the first step has none, because no step ends before it."""
    return rank["seconds"][warm(run) - 1 :]


def _speed(run: Run, time: Timing, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return TFLOP/s of a GPU in a step of the slowest rank, and their share of a matrix product on the slowest one."""
    seconds = max(statistics.median(_seconds(run, rank)) for rank in ranks)
    product = min(rank["product"] for rank in ranks) / 1e12
    tflops = time.tflops * time.likely / seconds  # the same FLOPs in the measured time
    return {"tflops": tflops, "product_tflops": product, "share_of_product": tflops / product}


def lines(answer: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{answer['name']}: {answer['layers']} of {answer['of_layers']} layers, {len(answer['ranks'])} x "
        f"{answer['device'] or 'unknown'}, {answer['steps']} steps; measured / planned = ratio"
    )
    for row in answer["ranks"]:
        yield f"rank {row['rank']}, stage {row['stage']}"
        for key in ("seconds", *STATES, "allocated", "reserved", "device"):
            scale, unit = (1e-3, "ms") if key == "seconds" else (1e9, "GB")
            planned, measured = (row[kind].get(key) for kind in ("planned", "measured"))
            if not planned and not measured:
                continue
            shown = ["-" if value is None else f"{value / scale:,.4g}" for value in (measured, planned)]
            ratio = f" = {row['ratio'][key]:.2f}" if key in row["ratio"] else ""
            yield f"    {'step' if key == 'seconds' else key:10} {shown[0]:>9} / {shown[1]:>9} {unit}{ratio}"
    if "tflops" in answer:
        yield (
            f"{answer['tflops']:.4g} TFLOP/s per rank, {answer['share_of_product']:.1%} of the "
            f"{answer['product_tflops']:.4g} of a matrix product right after"
        )
    if exhausted := answer["out_of_memory"]:
        allocated, whole = (exhausted[key] / 1e9 for key in ("allocated", "whole"))
        yield f"rank {exhausted['rank']}: out of memory with {allocated:.1f} of {whole:.1f} GB allocated"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def _arguments() -> argparse.Namespace:
    parser = entry.parser_of_run("trainer.trial", __doc__, "layout.nodes=1 layout.ep=8")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps, the first two to warm up (8)")
    parser.add_argument("--layers", type=int, metavar="K", help="number of layers to keep (all)")
    parser.add_argument("--rows", type=_positive, metavar="TOKENS", help="length of packed rows (a whole sequence)")
    parser.add_argument("--gpu", metavar="KIND", help="plan for this GPU instead of this machine's")
    parser.add_argument("--best", type=_positive, metavar="N", help="try the N fastest plans, and name the fastest")
    parser.add_argument("--profile", action="store_true", help="record one more step, and report its activity")
    parser.add_argument("--profile-to", metavar="FOLDER", help="folder for traces and page (runs/profile-CONF-TIME)")
    parser.add_argument("--json", action="store_true", help="for programs: one line with a list of all ranks")
    options = parser.parse_intermixed_args()
    options.profile = options.profile or options.profile_to is not None
    return options


if __name__ == "__main__":
    closed_pipe.run(main)
