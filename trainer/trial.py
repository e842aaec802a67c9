"""Take a few real steps of a run's layout on this machine, and compare time and memory with the plan.

    python -m trainer.trial CONF [--steps N] [--layers K] [--gpu KIND] [--profile] [--json] [key=value ...]
    python -m trainer.trial CONF --best N [--steps N] [--layers K] [--gpu KIND] [--json] [key=value ...]

    python -m trainer.trial glm47 --layers 6 layout.nodes=1 layout.gpus_per_node=1 layout.tp=1 layout.sp=false \\
        layout.pp=1 layout.vpp=null layout.ep=1 train.global_batch=4

It takes a fifth of an hour before a large run is paid for: one host, the run's own recipe and kernels, and no download.
The model is cut to K layers, of which as large a share is dense as in the whole model, with all its MTP layers; its
weights and tokens are drawn, and tokens are routed evenly. The plan is that of the cut model (conf/planner/), so that a
ratio of 1 here says that the plan of the whole model can be believed for this kind of layer and GPU. The step is the
median of those after the first two. Without --gpu the plan is for the GPU that is found here, if it is known.

With --profile one more step is recorded by torch's profiler, after another that is thrown away. A report says what the
GPUs and the host did in it (trainer/profiling/), and --profile-to names the folder that gets its page, its figures as
JSON, and every rank's trace.

With --best N the N fastest layouts that the plan finds for as many GPUs are tried after the configuration's own, and
the keys of the fastest one are printed. Each takes about a minute; runs/best-CONF-TIME.json has the figures so far.

Ranks start in the environment that those of a training get (conf/network.py); what is set here already wins.

Exit code 0: measured. 1: out of memory, which is a result as well, or a defect; of --best, no trial ended well. 2: the
arguments are at fault.

Not covered: several hosts; data that are not of equal length; on a CPU, all but the sizes of states.
"""

# pyright: reportArgumentType=false

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf import families
from conf.host import gpu_locks, nvidia_smi
from conf.load import dump, load
from conf.model_facts import ModelFacts, facts_from_hf
from conf.planner import hardware, verdict
from conf.planner.hardware import GPUS, Gpu, by_device, read
from conf.planner.memory import StageMemory, memory
from conf.planner.timing import Timing, timing
from conf.rules import objectives, schedule
from conf.rules.function import FIRST_DENSE, OF_LAYERS
from conf.rules.gpus import takes
from conf.rules.layout import grid, problems
from conf.schema.run import Run
from contract import closed_pipe
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.data.identity import MANIFEST
from trainer.data.write import sequences_file
from trainer.measure import EXHAUSTED, RESULT
from trainer.profiling import recorder, report
from trainer.rehearsal import best_layouts
from trainer.rehearse import config_of
from trainer.startup import entry

WARM = 2  # steps: kernels are chosen, states are made, the allocator has seen all sizes
RECORDING = 2  # further ones, until train.cuda_graphs has its graphs
RECORDED = 2  # steps that --profile adds: one in which the profiler starts, and the one that is kept
STATES = ("weights", "adapters", "gradients", "optimizer")


def main() -> int:
    options = _arguments()
    with entry.faults_in_one_line():
        asked = load(options.conf, options.overrides, illegal=True)
        if options.steps <= warm(asked):
            raise Fault(f"--steps: {options.steps}, but the first {warm(asked)} are not measured")
        config = config_of(asked)
        whole = facts_from_hf(config)
        run = verdict.settle(asked, whole, hardware.of(asked))
        if options.best is not None:
            return _best(options, asked, run, whole)
        if options.layers is not None:
            config = cut(config, options.layers)
        facts = facts_from_hf(config)
        if found := problems(run, facts):
            raise Fault("\n".join(found))
        gpu = read(options.gpu) if options.gpu else None
        keeps = _profile_folder(options) if options.profile else None
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            made = settle(run, config, options.steps, Path(folder), bool(keeps))
            what = f"trial of {run.name}, started by hand"
            with gpu_locks.taken(what, _to_stderr, count=takes(made, "train").gpus) as hold:
                code, ranks, exhausted = _measure(made, Path(folder), hold.environment if hold else {})
            for rank in ranks:
                rank["seconds"] = rank["seconds"][: options.steps - 1]  # those that are recorded take longer
            profile = _profiled(made, facts, ranks, keeps) if keeps and ranks else None
    if not ranks and not exhausted:
        return code
    gpu = gpu or by_device(ranks[0]["device"] if ranks else "")
    answer = compare(made, facts, gpu, ranks) | {"layers": facts.layers, "of_layers": whole.layers}
    answer |= {"steps": options.steps, "out_of_memory": exhausted}
    told = [*lines(answer), *(report.lines(profile) if profile else ())]
    answer |= {"profile": profile} if profile else {}
    print(json.dumps(answer) if options.json else "\n".join(told))
    return 0 if ranks else 1


def _best(options: argparse.Namespace, asked: Run, run: Run, facts: ModelFacts) -> int:
    """Try the best plans, and print the fastest. All rows stand in a file as soon as they are there."""
    if options.profile:
        raise Fault("--best: takes no --profile; profile the layout that it names")
    found = read(options.gpu) if options.gpu else by_device(nvidia_smi.kind() or "") or hardware.of(run)
    more = ["--steps", str(options.steps), *(["--gpu", options.gpu] if options.gpu else [])]
    more += ["--layers", str(options.layers)] if options.layers is not None else []
    tried = best_layouts.candidates(asked, run, facts, found, options.best)
    file = _place("best", options).with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    _to_stderr(f"{len(tried)} trials, of which {file} has what was measured; ms of a step / planned = ratio")
    rows: list[best_layouts.Row] = []
    for one in tried:
        rows.append(best_layouts.measured(one, options.conf, options.overrides, more))
        file.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
        _to_stderr(f"{len(rows)} of {len(tried)}  {best_layouts.line(rows[-1])}")
    named = best_layouts.verdict(rows, options.conf, options.overrides)
    print(json.dumps([row.as_json() for row in rows]) if options.json else named)
    return 0 if any(row.seconds is not None for row in rows) else 1


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Cut the model's config.json to so many layers, of every kind that it has."""
    facts = facts_from_hf(config)
    if not 1 <= layers <= facts.layers:
        raise Fault(f"--layers: {layers} is no number of layers from 1 to {facts.layers}")
    made = {**config, families.of(config).key("num_hidden_layers"): layers}
    if facts.experts and facts.dense_layers:
        share = round(facts.dense_layers * layers / facts.layers)
        made["first_k_dense_replace"] = min(layers - 1, max(1, share))
    if facts.dense_too:
        made["mlp_only_layers"] = [layer for layer in facts.dense_too if layer < layers]
    made |= {key: config[key][:layers] for key in (*OF_LAYERS, FIRST_DENSE) if isinstance(config.get(key), list)}
    if missing := {*facts.kinds} - {*facts_from_hf(made).kinds}:
        raise Fault(f"--layers: {layers} leaves no {missing.pop()} layer, of {facts.layers}")
    return made


def settle(run: Run, config: dict[str, Any], steps: int, folder: Path, profiled: bool = False) -> Run:
    """The run that is measured, with everything in this folder: model, tokens, and results."""
    steps += RECORDED if profiled else 0
    names = ("model", "base", "data", "output", "logs", "export")
    paths = run.paths.model_copy(update={name: str(folder / name) for name in names})
    facts = facts_from_hf(config)
    moe = run.moe.model_copy(update={"force_balance": bool(facts.experts)})
    log = run.log.model_copy(update={"profile_every": steps if profiled else None})
    made = schedule.of_steps(objectives.as_sft(run), steps).model_copy(update={"paths": paths, "moe": moe, "log": log})
    for name in names:
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_tokens(made, facts.vocab)
    return made


@dataclass(frozen=True)
class MadeUp:
    """Rows of drawn tokens, all as long as a sequence and its last label."""

    lengths: np.ndarray
    vocab: int

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.Generator(np.random.PCG64(int(rows[0])))
        ids = random.integers(0, self.vocab, int(self.lengths[rows].sum()), np.int32)
        return ids, np.ones(len(ids), bool)


def write_tokens(run: Run, vocab: int) -> None:
    """Write prepared data of one step, which training repeats."""
    rows, place = run.train.global_batch, Path(run.paths.data)
    source = MadeUp(np.full(rows, run.data.seq_length + 1), vocab)
    file = place / "training.idx.parquet"
    sequences_file.write(file, source, np.arange(rows), np.arange(rows + 1), pad_to=None, pad_id=0)
    counts = {"training": rows, "validation": 0, "test": 0}
    manifest = {"kind": "sft", "files": {}, "settings": {}, "sources": [], "tokenizer": ""}
    manifest |= {"rows": counts, "sequences": counts, "vocab_size": vocab, "pad_id": 0}
    (place / MANIFEST).write_text(json.dumps(manifest))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(
    run: Run, folder: Path, environment: dict[str, str]
) -> tuple[int, list[dict[str, Any]], dict[str, Any] | None]:
    """Exit code, what every rank has measured, and the rank that ran out of memory."""
    dump(run, folder / "run.yaml")
    command = [sys.executable, "-m", "trainer.measure", str(folder / "run.yaml")]
    code = subprocess.run(command, env=os.environ | environment, preexec_fn=_die_with_parent).returncode
    found = [_read(Path(run.paths.output) / name) for name in (RESULT, EXHAUSTED)]
    return (min(code, 2) if code >= 0 else 128 - code), found[0] or [], found[1]


def _profile_folder(options: argparse.Namespace) -> Path:
    """Folder that the profile goes to: new, so that no other profile is mixed with it."""
    folder = Path(options.profile_to or _place("profile", options)).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Fault(f"--profile-to: {folder} is there already, and not empty")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _place(what: str, options: argparse.Namespace) -> Path:
    """Place of a result that the caller gave none: in the folder of runs, by configuration and time."""
    runs = Path(os.environ.get("FINETUNE_RUNS") or "runs").expanduser()
    return runs / f"{what}-{Path(options.conf).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _profiled(run: Run, facts: ModelFacts, ranks: list[dict[str, Any]], keeps: Path) -> dict[str, Any]:
    """Keep the traces, and report on them."""
    for file in recorder.folder_of(run, run.train.steps).glob(report.TRACE.format("*")):
        shutil.move(file, keeps)
    each = facts.layers / run.layout.pp * grid(run.layout, run.train).microbatches
    measured = [_seconds(run, rank) for rank in ranks]
    usual = statistics.median(max(seconds) for seconds in zip(*measured, strict=False))
    return report.report(keeps, {"name": run.name, "seconds": usual, "layers_times_microbatches": each})


def _die_with_parent() -> None:
    end_with_parent()


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def compare(run: Run, facts: ModelFacts, gpu: Gpu | None, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Planned and measured seconds of a step and bytes, of every rank."""
    stages = memory(run, facts, gpu or GPUS["h200"])
    time = timing(run, facts, gpu or GPUS["h200"])
    rows = []
    for rank in range(run.world):
        stage = stages[rank * run.layout.pp // run.world]
        planned = _planned(stage) if gpu else {key: getattr(stage, key) for key in STATES}
        planned |= {"seconds": time.likely} if gpu else {}
        seen = ranks[rank] if ranks else {}
        measured = {key: seen[key] for key in (*STATES, "host_states") if seen}
        if seen:
            measured["seconds"] = statistics.median(_seconds(run, seen))
        if seen and seen["device"] != "cpu":
            measured |= {"allocated": seen["peak"], "reserved": seen["reserved"], "device": seen["used"]}
            measured |= {"resting": seen["resting"]}
        ratios = {key: measured[key] / planned[key] for key in measured if planned.get(key)}
        row: dict[str, Any] = {
            "rank": rank,
            "stage": stage.rank,
            "planned": planned,
            "measured": measured,
            "ratio": ratios,
        }
        rows.append(row | {key: seen.get(key, []) for key in ("seconds", "losses")} | {"parts": stage.items})
    answer = {"name": run.name, "device": ranks[0]["device"] if ranks else "", "gpu": gpu.name if gpu else None}
    answer |= {"tokens": run.train.global_batch * run.data.seq_length, "bubble": time.bubble, "ranks": rows}
    return answer | (_speed(run, time, ranks) if ranks else {})


def warm(run: Run) -> int:
    """Number of the first steps, which are not measured."""
    return WARM + RECORDING * run.train.cuda_graphs


def _seconds(run: Run, rank: dict[str, Any]) -> list[float]:
    """Seconds of the steps that are measured; the first step has none, as its start is another's end."""
    return rank["seconds"][warm(run) - 1 :]


def _speed(run: Run, time: Timing, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """TFLOP/s of a GPU in a step of the slowest rank, beside a matrix product on the slowest one."""
    seconds = max(statistics.median(_seconds(run, rank)) for rank in ranks)
    product = min(rank["product"] for rank in ranks) / 1e12
    tflops = time.tflops * time.likely / seconds  # the same FLOPs, in the time that was measured
    return {"tflops": tflops, "product_tflops": product, "share_of_product": tflops / product}


def _planned(stage: StageMemory) -> dict[str, float]:
    found: dict[str, float] = {key: getattr(stage, key) for key in STATES}
    return found | {"allocated": stage.allocated, "reserved": stage.allocated + stage.margin, "device": stage.total}


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
            f"{answer['tflops']:.4g} TFLOP/s a rank, {answer['share_of_product']:.1%} of the "
            f"{answer['product_tflops']:.4g} of a matrix product right after"
        )
    if seen := answer["out_of_memory"]:
        held, whole = (seen[key] / 1e9 for key in ("allocated", "whole"))
        yield f"rank {seen['rank']}: out of memory with {held:.1f} of {whole:.1f} GB allocated"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of layouts from 1 on")
    return int(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conf", help="a name (tiny), or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as layout.nodes=1 layout.ep=8")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps, the first two to warm up (8)")
    parser.add_argument("--layers", type=int, metavar="K", help="layers of the model that are kept; else all")
    parser.add_argument("--gpu", metavar="KIND", help="plan for this one instead of the one that is here")
    parser.add_argument("--best", type=_positive, metavar="N", help="try the N fastest plans, and name the fastest")
    parser.add_argument("--profile", action="store_true", help="record one more step, and say what was done in it")
    parser.add_argument("--profile-to", metavar="FOLDER", help="of the traces and the page (runs/profile-CONF-TIME)")
    parser.add_argument("--json", action="store_true", help="for programs: one line, with a list of all ranks")
    options = parser.parse_intermixed_args()
    options.profile = options.profile or options.profile_to is not None
    return options


if __name__ == "__main__":
    with closed_pipe.quiet():
        sys.exit(main())
