"""Compare training on a GPU with training on the CPU: tiny models, converted, trained on both, resumed and exported.

    python benchmarks/gpu/compare.py [--cpu-only] [--record] [--keep FOLDER] [--out FOLDER]       make gpu calls it

For two kinds of model, LoRA and full fine-tuning, fp32 and bf16: ten steps on the GPU, with Transformer Engine and
grouped GEMM, ten on the CPU, and golden.json's ten, recorded on a CPU once. Every loss of every step is compared.
Then, per kind and adapter in fp32, five steps on the GPU, whose checkpoint is resumed on the CPU and exported there;
these ten steps are compared with those of the runs that were not interrupted.

The table has the largest relative difference of each pair; below it stands the same as one line of JSON. Exit code 1
when a difference is above its bound or a run fails. --cpu-only leaves the GPU's part to the CPU, which tests this
script; --record writes golden.json. Runs are processes, as many at a time as there are cores, that share one turn of
the GPU, so the milliseconds per step are no measure of speed.
"""

import argparse
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden.json")
STEPS, STOP = 10, 5
BOUNDS = {"fp32": 1e-3, "bf16": 2e-2}  # relative
LOSSES = ("lm_loss", "mtp_loss")  # the second where the model has multi-token prediction
SETTINGS = [f"train.steps={STEPS}", "train.validate_every=0", f"checkpoint.save_every={STEPS}"]
# Adam's first steps are as long as the learning rate, whatever the gradient: where that is rounding noise, so is the
# step, and at conf/tiny.yaml's rate some later token goes to another expert. This is conf/glm47.yaml's rate.
RATE = "optimizer.lr=1e-4"
ADAPTERS = {"lora": ["adapter.kind=lora", RATE], "full": ["adapter.kind=none", RATE]}
RUN_SECONDS = 300  # most that a run may take; about 40 on an idle machine

Losses = dict[str, list[float]]  # by name, one value a step


class Case(NamedTuple):
    kind: str
    adapter: str
    precision: str

    def __str__(self) -> str:
        return " ".join(self)


CASES = [Case(*parts) for parts in product(("glm4-moe-mtp", "qwen3-moe", "qwen3-next"), ADAPTERS, BOUNDS)]


class RunFailed(Exception):
    """Failure of a trainer command, with the end of its log."""


def main(arguments: list[str] | None = None) -> int:
    options = read_arguments(arguments)
    started = time.monotonic()
    device = "CPU" if options.cpu_only else name_of_gpu()
    if device is None:
        print("no GPU here that torch can use, or no Transformer Engine beside it (see above)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="compare-") as temporary:
        work = Path(options.keep or temporary).absolute()
        work.mkdir(parents=True, exist_ok=True)
        with one_turn(gpu=not options.cpu_only):
            found, failures = run_all(work, gpu=not options.cpu_only)
        logs = "".join(f"===== {log.name}\n{log.read_text()[-8000:]}\n" for log in sorted(work.glob("*.log")))
    if options.record and not failures:
        GOLDEN.write_text(json.dumps({str(case): found["cpu", case]["losses"] for case in CASES}, indent=1) + "\n")
    rows = compare(found, json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {})
    passed = not failures and all(row["difference"] <= row["bound"] for row in rows)
    table = "\n".join([*lines_of(rows, found), *failures, f"{'passed' if passed else 'FAILED'} on {device}"])
    seconds = round(time.monotonic() - started)
    figures = {"passed": passed, "device": device, "seconds": seconds, "failures": len(failures), "differences": rows}
    figures["runs"] = [{"run": " ".join([name, *case]), **found[name, case]} for name, case in found]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.txt").write_text(table + "\n")
        (options.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        (options.out / "logs.txt").write_text(logs)
    print(table)
    print(json.dumps({**figures, "runs": len(found)}))
    return 0 if passed else 1


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a GPU's training with the CPU's on tiny models.")
    parser.add_argument("--cpu-only", action="store_true", help="let the CPU do the GPU's part as well")
    parser.add_argument("--record", action="store_true", help="write golden.json from this machine's CPU runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave all files")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path(out) if out else None, help="default: $OUT")
    return parser.parse_args(arguments)


def name_of_gpu() -> str | None:
    """The GPU's name, if training will find it and the real Transformer Engine."""
    code = "import torch, transformer_engine.pytorch, transformer_engine_torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else None


@contextlib.contextmanager
def one_turn(gpu: bool) -> Iterator[None]:
    """Have this host's GPU for all runs together, which would otherwise wait for one another."""
    sys.path.insert(0, str(ROOT))
    from conf.host import gpu_locks

    if not gpu:
        yield
        return
    hold = gpu_locks.take("comparison of a GPU with the CPU", print, count=1) or gpu_locks.Hold()
    with contextlib.closing(hold):
        os.environ.update(hold.environment)
        yield


def run_all(work: Path, gpu: bool) -> tuple[dict[tuple[str, Case], Any], list[str]]:
    """Results by (name of the run, case), and failures. A run that depends on another waits for it in its thread."""
    jobs: dict[tuple[str, Case], Future] = {}
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        models = {kind: pool.submit(prepare, work, kind) for kind in {case.kind for case in CASES}}

        def after_model(function: Callable, case: Case, *rest) -> Any:
            return function(work, models[case.kind].result(), case, *rest)

        interrupted = [case for case in CASES if case.precision == "fp32"]
        jobs |= {("resumed", case): pool.submit(after_model, resume_and_export, case, gpu) for case in interrupted}
        if gpu:
            jobs |= {("gpu", case): pool.submit(after_model, train, case, "gpu", True) for case in CASES}
        jobs |= {("cpu", case): pool.submit(after_model, train, case, "cpu", False) for case in CASES}
    errors = {key: job.exception() for key, job in jobs.items()}
    failures = [f"{' '.join([name, *case])}: {error}" for (name, case), error in errors.items() if error]
    return {key: job.result() for key, job in jobs.items() if not errors[key]}, failures


def prepare(work: Path, kind: str) -> list[str]:
    """Make the model and its data and convert it on the CPU. Returns the settings that name them."""
    model, base, data = (work / f"{kind}-{what}" for what in ("model", "base", "data"))
    paths = [f"paths.model={model}", f"paths.base={base}", f"paths.data={data}"]
    log = work / f"{kind}-convert.log"
    start("trainer.tiny", kind, str(model), log=log)
    start("trainer.tiny", "data", str(data), log=log)
    start("trainer.convert", "tiny", *paths, f"paths.output={work / kind}-convert", log=log)
    return paths


def train(work: Path, paths: list[str], case: Case, name: str, gpu: bool) -> dict[str, Any]:
    """Train ten steps without interruption."""
    output = work / "-".join([*case, name])
    train_in(output, paths, case, gpu)
    return results(output)


def resume_and_export(work: Path, paths: list[str], case: Case, gpu: bool) -> dict[str, Any]:
    """Train five steps on the GPU, the others on the CPU, and export the merged model."""
    output = work / "-".join([*case, "resumed"])
    train_in(output, paths, case, gpu, f"train.stop_after={STOP}")
    train_in(output, paths, case, False)
    exported = output.with_name(f"{output.name}-exported")
    settings = [*SETTINGS, *ADAPTERS[case.adapter], f"train.precision={case.precision}", *paths]
    places = [f"paths.output={output}", f"paths.export={exported}"]
    start("trainer.export", "tiny", *settings, *places, log=output.with_name(output.name + ".log"))
    return {**results(output), "changed_tensors": changed_tensors(work / f"{case.kind}-model", exported / "merged")}


def train_in(output: Path, paths: list[str], case: Case, gpu: bool, *more: str) -> None:
    settings = [*SETTINGS, *ADAPTERS[case.adapter], f"train.precision={case.precision}", *paths, *more]
    log = output.with_name(output.name + ".log")
    start("trainer.train", "tiny", *settings, f"paths.output={output}", log=log, gpu=gpu, precision=case.precision)


def start(module: str, *arguments: str, log: Path, gpu: bool = False, precision: str = "") -> None:
    """Run a command of the trainer, on the CPU unless told otherwise; raise RunFailed with the end of its log."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "2"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif precision == "fp32":
        environment["NVIDIA_TF32_OVERRIDE"] = "0"  # Transformer Engine multiplies fp32 in TF32, good to three digits
    with log.open("a") as f:
        print("$", "python -m", module, *arguments, file=f, flush=True)
        command = [sys.executable, "-m", module, *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=f, stderr=f, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{module} took more than {RUN_SECONDS} s\n{log.read_text()[-3000:]}") from None
    if done.returncode:
        raise RunFailed(f"{module} ended with exit code {done.returncode}\n{log.read_text()[-3000:]}")


def results(output: Path) -> dict[str, Any]:
    """Results that a run wrote into metrics.jsonl: its losses, and the milliseconds of a step once it runs warm."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("kind") == "train"]
    if [line["step"] for line in steps] != list(range(1, STEPS + 1)):
        raise RunFailed(f"{output / 'metrics.jsonl'} has the steps {[line['step'] for line in steps]}")
    losses = {name: [line[name] for line in steps] for name in LOSSES if name in steps[0]}
    return {"losses": losses, "milliseconds": statistics.median(line["step_seconds"] for line in steps[3:]) * 1e3}


def changed_tensors(model: Path, exported: Path) -> str:
    """Number of the model's tensors that training has changed. The export has to have the same names and shapes."""
    before, after = tensors(model), tensors(exported)
    names = {name for name in before.keys() | after.keys() if name not in before or name not in after}
    names |= {name for name in before.keys() & after.keys() if before[name].shape != after[name].shape}
    if names:
        raise RunFailed(f"{exported}: {len(names)} tensors are missing, new or of another shape: {sorted(names)[:3]}")
    changed = sum(tensor.content != after[name].content for name, tensor in before.items())
    if not changed:
        raise RunFailed(f"{exported}: every tensor is the released one, so nothing that was trained is in it")
    return f"{changed} of {len(before)}"


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    content: bytes


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder of safetensors files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        start_of_data = 8 + struct.unpack_from("<Q", content)[0]
        for name, entry in json.loads(content[8:start_of_data]).items():
            if name != "__metadata__":
                first, last = (start_of_data + offset for offset in entry["data_offsets"])
                found[name] = Tensor(tuple(entry["shape"]), content[first:last])
    return found


def compare(found: dict[tuple[str, Case], Any], golden: dict[str, Losses]) -> list[dict[str, Any]]:
    """The largest relative difference of each pair of runs of each case; a pair that is not there is left out."""
    rows = []
    for case in CASES:
        runs = {name: found[name, case]["losses"] for name in ("gpu", "cpu", "resumed") if (name, case) in found}
        if str(case) in golden:
            runs["golden"] = golden[str(case)]
        pairs = [("gpu", "cpu"), ("gpu", "golden"), ("cpu", "golden"), ("resumed", "gpu"), ("resumed", "cpu")]
        for one, other in pairs:
            if one in runs and other in runs:
                worst = difference(runs[one], runs[other])
                rows.append({"case": str(case), "pair": f"{one}/{other}", "difference": worst})
                rows[-1]["bound"] = BOUNDS[case.precision]
    return rows


def difference(one: Losses, other: Losses) -> float:
    """The largest over all losses and steps; infinite where the runs have other losses, or one is no number."""
    if one.keys() != other.keys():
        return float("inf")
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    return max(abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in pairs)


def lines_of(rows: list[dict[str, Any]], found: dict[tuple[str, Case], Any]) -> list[str]:
    """Lines of the table: a line a case, a column a pair; ! marks a figure above the bound."""
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    head = ["model", "adapter", "", "bound", *pairs, "ms/step", "exported: changed tensors"]
    cells = [head]
    for case in CASES:
        own = {row["pair"]: row for row in rows if row["case"] == str(case)}
        marks = [mark(own.get(pair)) for pair in pairs]
        timed = found.get(("gpu", case)) or found.get(("cpu", case))
        time_of_step = f"{timed['milliseconds']:.0f}" if timed else "failed"
        changed = found.get(("resumed", case), {}).get("changed_tensors", "")
        cells.append([*case, f"{BOUNDS[case.precision]:.0e}", *marks, time_of_step, changed])
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def mark(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['difference']:.1e}" + (" !" if row["difference"] > row["bound"] else "")


if __name__ == "__main__":
    sys.exit(main())
