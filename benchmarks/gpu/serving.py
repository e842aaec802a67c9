"""Serve one trained model in every way on this host's GPUs: seconds until each answers, and whether all say the same.

    benchmarks/gpu/run serving.py OUT                                  about 6 minutes on one or two H200, 30 GB of disk
    python benchmarks/gpu/serving.py OUT --size tiny --work FOLDER     rehearses it on a CPU in 3 minutes

A Qwen3-MoE of 1.6 billion random weights in bf16 (tiny: a Llama of 4 layers) is trained for six steps with LoRA by the
trainer's commands, exported both ways, and served by trainer.evaluate: merged and as the base with the adapter beside
it, without and with graphs (the second time from another folder, so that what was compiled has to be found again), in
FP8, and over two GPUs. OUT/serving.txt has a row for each: seconds until it answered and in all, nats a token from what
training says and from the first way of serving, and how many tokens it writes as that does. OUT/logs has what each
printed. Exit code 1 where one fails, or is further than the bound of bf16 from the first (FP8 has its own gate).
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import whole_flow

ROOT = Path(__file__).resolve().parents[2]
CONF = """\
name: serving
model: {{source: {work}/model}}
data: {{source: {work}/rows.jsonl, seq_length: {length}, packed: true, template: "{{input}} {{output}}",
  validation: 0.05, test: 0.04}}
adapter: {{rank: 16, alpha: 32}}
train: {{steps: {steps}, global_batch: 8, micro_batch: 1, precision: {precision}, validate_every: 0}}
optimizer: {{lr: 1e-3, warmup_steps: 1}}
checkpoint: {{save_every: {steps}}}
evaluate: {{rows: 20, max_tokens: 8}}
"""
PATHS = ("model", "base", "data", "output", "export")
MERGED, BOUND = "merged", 0.05
OF_BASE = "evaluations/base-fp8"


@dataclass(frozen=True)
class Way:
    """A way of serving the model."""

    name: str
    changes: tuple[str, ...]
    gpus: int = 1  # 0 where a CPU will do
    lane: int = 0  # of two that go side by side, where there are two GPUs
    base: bool = False  # the untrained model
    elsewhere: bool = False  # in another folder

    @property
    def rounded(self) -> bool:
        return any("quantization" in change for change in self.changes)


EAGER, GRAPHS, FP8 = "evaluate.eager=true", "evaluate.eager=false", "evaluate.quantization=fp8"
BESIDE = "evaluate.adapter=unmerged"
WAYS = (
    Way(MERGED, (EAGER,), gpus=0),
    Way("merged, again", (EAGER,), gpus=0),
    Way("unmerged", (EAGER, BESIDE), gpus=0, lane=1),
    Way("merged, graphs", (GRAPHS,)),
    Way("merged, graphs, again", (GRAPHS,), elsewhere=True),
    Way("base, fp8", (EAGER, FP8), lane=1, base=True),
    Way("merged, fp8", (EAGER, FP8), lane=1),
    Way("unmerged, graphs", (GRAPHS, BESIDE), lane=1),
    Way("merged, 2 GPUs", (EAGER,), gpus=2),
    Way("unmerged, 2 GPUs", (EAGER, BESIDE), gpus=2),
    Way("unmerged, 2 GPUs, whole experts", (EAGER, BESIDE, "evaluate.expert_parallel=true"), gpus=2),
)


@dataclass
class Result:
    code: int
    seconds: float
    output: str
    record: dict = field(default_factory=dict)
    parity: dict = field(default_factory=dict)

    @property
    def answered(self) -> str:
        found = re.search(r"vLLM answers in .*, after ([\d.]+) s", self.output)
        return found[1] if found else ""


class Bench:
    """One model, trained once, and how each way of serving it went."""

    def __init__(self, work: Path, out: Path, until: float):
        self.work, self.out, self.until = work, out, until
        self.results: dict[str, Result] = {}
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def command(self, name: str, shown: str, *changes: str, gpus: str = "0") -> Result:
        arguments = [f"paths.{key}={self.work / key}" for key in PATHS]
        arguments += [f"paths.logs={self.work / 'logs'}", *changes]
        if not any(change.startswith("paths.parity=") for change in changes):
            arguments.append(f"paths.parity={self.work}/output/parity.json")
        began, log = time.monotonic(), self.logs / f"{shown.replace(', ', '-').replace(' ', '-')}.log"
        left = {key: value for key, value in os.environ.items() if key not in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
        own = {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        if importlib.util.find_spec("flashinfer") is None:  # vLLM does not start else
            own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        with log.open("w") as file:
            line = [sys.executable, "-m", f"trainer.{name}", str(self.work / "serving.yaml"), *arguments]
            within = max(1.0, self.until - time.monotonic())
            running = subprocess.Popen(line, cwd=ROOT, env=left | own, stdout=file, stderr=file, start_new_session=True)
            try:
                code = running.wait(within)
            except subprocess.TimeoutExpired:
                code = -1
                os.killpg(running.pid, 9)
                running.wait()
        found = Result(code, time.monotonic() - began, log.read_text(errors="replace"))
        print(f"{shown}: code {code}, {found.seconds:.1f} s", flush=True)
        return found

    def train(self) -> bool:
        """Whether the model is trained and exported."""
        return all(self.command(name, name).code == 0 for name in ("prepare", "convert", "train", "export"))

    def serve(self, way: Way, gpus: str) -> None:
        if time.monotonic() > self.until - 20:
            return
        folder = self.work / "evaluations" / way.name.replace(", ", "-").replace(" ", "-")
        served = self.work / ("model" if way.base else "export/merged")
        if way.elsewhere:
            served = self.work / "elsewhere"
            shutil.copytree(self.work / "export", served, copy_function=os.link)
            served = served / "merged"
        changes = [f"paths.evaluation={folder}", f"paths.kernels={self.work}/kernels-{way.lane}", *way.changes]
        changes += [f"paths.served={served}"]
        changes += [f"paths.parity={self.work}/none.json" if way.base else f"paths.of_base={self.work}/{OF_BASE}"]
        changes += [f"evaluate.gpus={len(gpus.split(','))}"]
        found = self.command("evaluate", way.name, *changes, gpus=gpus)
        with contextlib.suppress(OSError, ValueError):
            found.record = json.loads((folder / "log_probs.json").read_text())
            found.parity = json.loads((folder / "results.json").read_text())["parity"] or {}
        with contextlib.suppress(OSError):
            shutil.copyfile(folder / "log.txt", self.logs / f"{folder.name}.vllm.log")
        self.results[way.name] = found

    def serve_all(self, ways: list[Way], gpus: int) -> None:
        """Serve in all these ways: those of one GPU in two lanes where there are two."""
        lanes = {lane: [way for way in ways if way.gpus < 2 and (way.lane == lane or gpus < 2)] for lane in (0, 1)}
        if gpus < 2:
            del lanes[1]
        threads = [
            threading.Thread(target=lambda of_lane=of_lane, lane=lane: [self.serve(way, str(lane)) for way in of_lane])
            for lane, of_lane in lanes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for way in ways:
            if way.gpus == 2 and gpus >= 2:
                self.serve(way, "0,1")


def apart(one: dict, other: dict) -> tuple[float, int, int] | None:
    """Mean difference in nats a token, tokens written alike, and all of them."""
    pairs = [*zip(one.get("rows", ()), other.get("rows", ()), strict=False)]
    values = [abs(a - b) for p, q in pairs for a, b in zip(p["log_probs"], q["log_probs"], strict=True)]
    written = [a == b for p, q in pairs for a, b in zip(p["written"], q["written"], strict=False)]
    return (sum(values) / len(values), sum(written), len(written)) if values else None


def judge(ways: list[Way], results: dict[str, Result]) -> tuple[list[str], list[str]]:
    """Lines of the report, and problems."""
    columns = ("way", "answers after s", "whole s", "nats from training", "p90", "as written and read")
    columns += ("nats from merged", "tokens as merged", "code")
    lines, wrong = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"], []
    first = results.get(MERGED)
    for way in ways:
        found = results.get(way.name)
        if found is None:
            lines.append(f"| {way.name} |" + " |" * (len(columns) - 1))
            wrong.append(f"{way.name}: not run, for want of time")
            continue
        parity, beside = found.parity, apart(found.record, first.record) if first else None
        cells = [way.name, found.answered, f"{found.seconds:.1f}"]
        cells += [f"{parity['mean']:.2e}", f"{parity['p90']:.2e}"] if parity else ["", ""]
        cells += [f"{parity['decoded']['mean']:.2e}" if "decoded" in parity else ""]
        cells += [f"{beside[0]:.2e}", f"{beside[1]} of {beside[2]}"] if beside else ["", ""]
        lines.append("| " + " | ".join([*cells, str(found.code)]) + " |")
        if found.code:
            last = found.output.strip().splitlines()[-1:] or ["nothing was said"]
            wrong.append(f"{way.name}: code {found.code}: {last[0]}")
        elif not way.rounded and (beside is None or beside[0] > BOUND):
            wrong.append(f"{way.name}: {beside and beside[0]} nats a token from merged, the bound is {BOUND}")
    return lines, wrong


def main() -> int:
    options = _arguments()
    sys.path.insert(0, str(ROOT))
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="serving-", dir=options.work))
    try:
        return _measure(options, work, began)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _measure(options: argparse.Namespace, work: Path, began: float) -> int:
    gpus = gpus_here()
    bench = Bench(work, options.out, began + options.seconds)
    if options.size == "tiny":
        from trainer.rehearsal import tiny_models

        tiny_models.make_model("llama", work / "model")
        whole_flow.make_data(work / "rows.jsonl")
    else:
        whole_flow.make_model(work / "model", whole_flow.of_size(options.size))
        whole_flow.make_data(work / "rows.jsonl")
    kind = dict(length=1024, precision="bf16") if gpus else dict(length=256, precision="fp32")
    (work / "serving.yaml").write_text(CONF.format(work=work, steps=options.steps, **kind))
    ways = [way for way in WAYS if way.gpus <= gpus and (not options.only or way.name in options.only)]
    wrong = [] if bench.train() else ["training or export has failed: OUT/logs"]
    trained = time.monotonic() - began
    if not wrong:
        bench.serve_all(ways, gpus)
    lines, found = judge(ways, bench.results)
    spent = time.monotonic() - began
    head = f"{options.size} on {gpus} GPUs: model, training and export {trained:.0f} s, all {spent:.0f} s"
    ends = [f"WRONG: {line}" for line in wrong or found] or ["all right"]
    told = [
        line for result in bench.results.values() for line in re.findall("^evaluate: parity.*$", result.output, re.M)
    ]
    text = "\n".join([head, "", *lines, "", *told, "", *ends])
    (options.out / "serving.txt").write_text(text + "\n")
    print(text)
    return 1 if wrong or found else 0


def gpus_here() -> int:
    with contextlib.suppress(OSError):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return len(re.findall(r"^GPU \d+:", answer.stdout, re.MULTILINE))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=("tiny", "3gb", "10gb"), default="3gb")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=[way.name for way in WAYS], help="ways to serve (default all)")
    parser.add_argument("--seconds", type=float, default=540, help="after which no other way is tried (default 540)")
    parser.add_argument("--work", type=Path, help="folder for model and exports (default a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
