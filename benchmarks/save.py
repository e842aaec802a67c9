"""Host memory of full training while it saves a checkpoint and while it resumes, next to the plan.

    python -m benchmarks.save [--layers 9] [--only dense moe] [--ranks 1 2 4]      make bench-save
    python -m benchmarks.save --stalls [--every 4] [--ranks 1] [--set KEY=VALUE ...]

Draws a dense model of 13.9 M parameters a layer and a mixture of experts of 13.7 M a layer, trains all weights in fp32
on this CPU for two steps, saves, and resumes. --only moe-ep2 has the experts on two ranks. Memory is the proportional
set size (PSS) of all processes together, sampled 20 times a second: at most until the first step ends, at most after
the last step, when a checkpoint is written, and at most of a resumed run, which loads, takes a step and saves. "files"
are the bytes of the checkpoint, which are copied before they are written. 4 ranks with 9 layers take about 10 GB.

--stalls trains with checkpoint.background false and true, here or on this host's GPUs (--set train.precision=bf16), and
saves four times, every 4 steps. Seconds: standstill of the first save, which allocates the memory of copies, and of the
next two, median; writing; a step while a checkpoint is written, and any other, median. The last save is not counted.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.data import memory
from benchmarks.workspace import workspace
from conf.load import dump, load
from conf.planner import hardware, parameters
from conf.planner.verdict import facts_of, plan
from conf.schema.run import Run
from contract import closed_pipe
from trainer.data.made_texts import stories
from trainer.rehearsal import tiny_models

ROOT = Path(__file__).parents[1]
GB = 10**9
DENSE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16}
DENSE |= {"head_dim": 64}
MOE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 1024}
CASES = {"dense": ("llama", DENSE, 1), "moe": ("qwen3-moe", MOE, 1), "moe-ep2": ("qwen3-moe", MOE, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--stalls", action="store_true")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    if options.stalls:
        titles = " ".join(f"{title:>7}" for title in ("first", "stall", "writing", "during", "other"))
        print(f"{'seconds':8} ranks {'background':10} {titles}", flush=True)
        with workspace("save") as folder:
            for name in options.only:
                for ranks in options.ranks:
                    stalls(folder, name, ranks, options)
        return
    titles = " ".join(f"{title:>7}" for title in ("steps", "files", "save", "resume", "plan"))
    print(f"{'GB':8} ranks {titles} most/plan", flush=True)
    with workspace("save") as folder:
        for name in options.only:
            for ranks in options.ranks:
                if ranks >= CASES[name][2]:
                    measure(folder, name, ranks, options.layers)


def stalls(folder: Path, name: str, ranks: int, options: argparse.Namespace) -> None:
    every, run = options.every, _drawn(folder, name, options.layers, *options.set)
    for background in ("false", "true"):
        keys = {"checkpoint.background": background, "checkpoint.save_every": every, "train.steps": 4 * every}
        dump(run(keys | {"layout.gpus_per_node": ranks}), folder / "run.yaml")
        _end(_start(folder, ["train", folder / "run.yaml"]), folder)
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        saves = [line for line in lines if line["kind"] == "checkpoint"][:-1]
        steps: dict[bool, list[float]] = {False: [], True: []}  # by whether a checkpoint was being written
        for line in (line for line in lines if line["kind"] == "train" and line["step"] > 2):
            start, end = line["time"] - line["step_seconds"], line["time"]
            writes = ((save["time"] - save["writing_seconds"], save["time"]) for save in saves)
            steps[any(first < end and start < last for first, last in writes)].append(line["step_seconds"])
        stalled = [save["stalled_seconds"] for save in saves]
        shown = [stalled[0], median(stalled[1:]), median(save["writing_seconds"] for save in saves[1:])]
        shown += [median(steps[key]) if steps[key] else 0.0 for key in (True, False)]
        print(f"{name:8} {ranks:5} {background:10} " + " ".join(f"{one:7.3f}" for one in shown), flush=True)
        shutil.rmtree(folder / "run")


def measure(folder: Path, name: str, ranks: int, layers: int) -> None:
    ep, run = CASES[name][2], _drawn(folder, name, layers, "checkpoint.save_every=1", "train.steps=2")
    first = run({"layout.gpus_per_node": ranks, "layout.ep": ep})
    facts = facts_of(first)
    steps, save = _trained(folder, first)
    shutil.rmtree(folder / "run/checkpoints/iter_0000002")
    resumed = max(_trained(folder, first))
    planned = next(need.memory for need in plan(first, facts, hardware.of(first)).needs if need.stage == "train")
    shown = [steps, 16 * parameters.total(facts), save, resumed, planned]
    figures = " ".join(f"{one / GB:7.2f}" for one in shown)
    print(f"{name:8} {ranks:5} {figures} {max(steps, save, resumed) / planned:9.2f}", flush=True)
    shutil.rmtree(folder / "run")


def _drawn(folder: Path, name: str, layers: int, *overrides: str) -> Callable[[dict[str, Any]], Run]:
    """Prepare a model that is drawn, once. Return a function of keys that makes a run of its training."""
    kind, widths, _ = CASES[name]
    config = tiny_models.KINDS[kind] | widths | {"num_hidden_layers": layers}
    conf = folder / f"{kind}.yaml"
    conf.write_text(f"name: save\nextends: tiny-pretrain\nmodel: {{source: {{config: {json.dumps(config)}}}}}\n")
    paths = {"model": folder / kind, "base": folder / f"{kind}-base", "data": folder / "data", "output": folder / "run"}
    keys = {f"paths.{key}": path for key, path in paths.items()}
    keys |= {"paths.parity": folder / "parity.json", "paths.logs": folder / "logs"}
    keys |= {"data.source": folder / "texts.jsonl", "train.global_batch": 4, "train.micro_batch": 1}
    keys |= {"optimizer.warmup_steps": 0, "train.validate_every": 0}
    keys |= dict(one.split("=", 1) for one in overrides)

    def run(more: dict[str, Any]) -> Run:
        return load(str(conf), [f"{key}={value}" for key, value in (keys | more).items()])

    if not paths["base"].exists():
        _prepare(folder, config, run({}))
    return run


def _prepare(folder: Path, config: dict[str, Any], run: Run) -> None:
    if not (folder / "tokenizer").exists():
        (folder / "tokenizer").mkdir()
        tiny_models.make_tokenizer(folder / "tokenizer", 500)
        (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stories(100, seed=1)))
    (folder / "config.json").write_text(json.dumps(config))
    drawn = [folder / "config.json", run.paths.model, "--tokenizer", folder / "tokenizer"]
    dump(run, folder / "run.yaml")
    for command in (["weights.drawn", *drawn], ["prepare", folder / "run.yaml"], ["convert", folder / "run.yaml"]):
        if command[0] != "prepare" or not Path(run.paths.data).exists():
            _end(_start(folder, command), folder)


def _trained(folder: Path, run: Run) -> tuple[float, float]:
    """Train. Return the most memory until the first step ends, and the most after the second."""
    dump(run, folder / "run.yaml")
    metrics, process = Path(run.paths.output, "metrics.jsonl"), _start(folder, ["train", folder / "run.yaml"])
    most = {False: 0.0, True: 0.0}  # by whether the second step has ended
    while process.poll() is None:
        lines = metrics.read_text() if metrics.exists() else ""
        if (ended := '"step": 2,' in lines) or '"step": 1,' not in lines:
            most[ended] = max(most[ended], memory(process.pid) * 1e6)
        time.sleep(0.05)
    _end(process, folder)
    return most[False], most[True]


def _start(folder: Path, command: list[Any]) -> subprocess.Popen:
    name, *arguments = map(str, command)
    with (folder / "log").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", f"trainer.{name}", *arguments], cwd=ROOT, stdout=log, stderr=log)


def _end(process: subprocess.Popen, folder: Path) -> None:
    if process.wait():
        sys.exit((folder / "log").read_text()[-3000:])


if __name__ == "__main__":
    with closed_pipe.quiet():
        main()
