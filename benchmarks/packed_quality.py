"""Quality of adapters on a packed base (model.base), and of exports in 8 and 4 bits, over several seeds.

    python -m benchmarks.packed_quality             five seeds of each base: 30 minutes     make bench-packed
    python -m benchmarks.packed_quality --short     one seed and fewer steps: 6 minutes     make bench-packed SHORT=1
    python -m benchmarks.packed_quality --model FOLDER --rows FILE.jsonl      of a released model

All weights of a tiny model are trained in fp32 until it answers a ticket (trainer/data/tickets.py) with its team and
order. Then LoRA trains it to answer another question with both in the opposite order, on each base and with each seed.
Each adapter of the unpacked base is then merged and exported in each format of export.quantization, and the export is
read again as a model. With --model LoRA trains this model on rows of {"input", "output"}; the last N of --held-out are
held out. With --serve N vLLM reads the held-out rows of N seeds too: merged models, and adapters on the codes of their
base. On a GPU all seeds of a base train at the same time.

The output has for each base: its rounding error (trainer/weights/quantised/report.py); the loss of held-out rows in
nats per token before and after LoRA, with mean and standard deviation over the seeds; and the difference from bf16,
in standard errors over pairs of runs with the same seed. Each format of an export has a row too. With one seed there is
no deviation and no error. "served" is the loss in vLLM. It is empty if the trainer refuses to export or serve the
format. The reason is printed.

Not covered: sampled answers; without --model, weights of real widths, which have other outliers.
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.workspace import workspace
from conf.load import load
from conf.rules import shipping
from conf.rules.packed_base import FORMATS
from conf.schema.run import Run
from trainer import convert, export, train
from trainer.data import prepared
from trainer.data.tickets import tickets
from trainer.rehearsal import forked_ranks, tiny_models
from trainer.startup import device
from trainer.weights.quantised import report

BASES = ("bf16", *FORMATS)
EXPORTS = shipping.ROUNDED
ROWS = 1600
CONF = """
name: quality
model: {source: made by trainer.tiny, compare: false}
data: {seq_length: 96, template: "{input} {output}"}
train: {steps: 1000, global_batch: 16, micro_batch: 16, precision: fp32, validate_batches: 16}
optimizer: {lr: 1e-3}
checkpoint: {save_every: 100000}
evaluate: {tasks: [held_out], rows: 256, max_tokens: 1, parity_rows: 0}
"""
WHOLE = "adapter.kind=none optimizer.lr=1e-3 optimizer.warmup_steps=20"
LORA = "adapter.rank=16 adapter.alpha=32 optimizer.warmup_steps=5"
STILL = "optimizer.lr=1e-12 optimizer.warmup_steps=0"
CODES = "export.checkpoint=base export.quantization=packed"


class Bench:
    def __init__(self, folder: Path, keys: list[str], held_out: int):
        self.folder, self.keys, self.counter = folder, keys, itertools.count(1)
        self.gpu, self.held_out = device.has_gpu(), held_out
        (folder / "conf.yaml").write_text(CONF)

    def _keys(self, model: str, *overrides: str, **places: Path) -> tuple[list[str], Path]:
        """Keys of a command on this model, and the folder of its output."""
        out = self.folder / f"{next(self.counter):03}"
        usual = {"model": self.folder / model, "base": self.folder / f"{model}-base", "output": out, "export": out}
        usual |= {"evaluation": out, "kernels": self.folder / "kernels", "logs": out.with_suffix(".logs")}
        paths = [f"paths.{key}={place}" for key, place in (usual | places).items()]
        given = dict(one.split("=", 1) for one in (*paths, *self.keys, *overrides))  # the last of a key counts
        return [f"{key}={value}" for key, value in given.items()], out

    def call(self, command: Callable[[Run], Any], model: str, *overrides: str, **places: Path) -> Path:
        """Run a command of the trainer on this model, and return the folder of its output."""
        keys, out = self._keys(model, *overrides, **places)
        log = out.with_suffix(".log")
        if self.gpu and command is not prepared.make:  # a process that has CUDA cannot be forked
            code = self._run(command.__module__, keys, log)
        else:
            code = forked_ranks.call(command, load(self.folder / "conf.yaml", keys), log)
        if code:
            raise RuntimeError(f"{command.__module__} failed:\n{log.read_text()[-3000:]}")
        return out

    def serve(self, model: str, *overrides: str, **places: Path) -> float | None:
        """The loss of held-out rows in vLLM. None if trainer.evaluate refuses the model or fails; it prints why."""
        keys, out = self._keys(model, *overrides, data=self.folder / "then" / "data", **places)
        log = out.with_suffix(".log")
        if self._run("trainer.evaluate", keys, log):
            print("not served:", *log.read_text().splitlines()[-3:], sep="\n", flush=True)
            return None
        return -json.loads((out / "results.json").read_text())["metrics"]["held_out/log_likelihood"]

    def _run(self, module: str, keys: list[str], log: Path) -> int:
        command = [sys.executable, "-m", module, str(self.folder / "conf.yaml"), *keys]
        with log.open("w") as file:
            return subprocess.run(command, stdout=file, stderr=file, cwd=Path(__file__).parents[1]).returncode

    def each(self, work: Callable[[str], Any], seeds: list[str]) -> list[Any]:
        """Do the work for each seed: at the same time on a GPU, in turn on a CPU, where threads cannot fork ranks."""
        if not self.gpu:
            return [*map(work, seeds)]
        with ThreadPoolExecutor(len(seeds)) as pool:
            return [*pool.map(work, seeds)]

    def train(self, model: str, data: str, steps: int, *overrides: str) -> tuple[Path, float]:
        """Train, and return the output's folder and the loss of held-out rows."""
        more = [f"train.steps={steps}", f"train.validate_every={steps}", *overrides]
        out = self.call(train.main, model, *more, data=self.folder / data / "data")
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return out, [line["lm_loss"] for line in lines if line["kind"] == "validation"][-1]


def write(folder: Path, held_out: int, question: str, answer: str) -> None:
    rows = []
    for number, (ticket, team) in enumerate(tickets(ROWS + held_out, 1).items()):
        found = re.search(r"\d{4}", ticket)
        assert found, f"ticket {number} has no order"
        text = ticket.removesuffix("Team:") + question
        rows.append(json.dumps({"input": text, "output": answer.format(found[0], team)}) + "\n")
    random.Random(1).shuffle(rows)
    split(rows, folder, held_out)


def split(rows: list[str], folder: Path, held_out: int) -> None:
    folder.mkdir()
    (folder / "training.jsonl").write_text("".join(rows[:-held_out]))
    for name in ("validation", "test"):
        (folder / f"{name}.jsonl").write_text("".join(rows[-held_out:]))


def make_model(bench: Bench, kind: str, steps: int) -> None:
    """Write a model that knows one question, and the data of both questions."""
    tiny_models.make_model(kind, bench.folder / "drawn", dtype="float32")
    for name, question, answer in (("first", "Team and order:", "{1} {0}"), ("then", "Who wants what:", "{0} {1}")):
        write(bench.folder / f"{name}-given", bench.held_out, question, answer)
        bench.call(prepared.make, "drawn", data=bench.folder / f"{name}-given", output=bench.folder / name)
    bench.call(convert.main, "drawn", *WHOLE.split())
    out, known = bench.train("drawn", "first", steps, *WHOLE.split())
    print(f"pretrained for {steps} steps: {known:.4f} nats a token of held-out rows", flush=True)
    made = bench.call(export.main, "drawn", *WHOLE.split(), output=out)
    (made / "merged").rename(bench.folder / "model")


def take_model(bench: Bench, model: Path, file: Path) -> None:
    """Give the bench a released model and its rows, for both questions."""
    (bench.folder / "model").symlink_to(model.resolve())
    split(file.read_text().splitlines(keepends=True), bench.folder / "given", bench.held_out)
    bench.call(prepared.make, "model", data=bench.folder / "given", output=bench.folder / "then")
    (bench.folder / "first").symlink_to("then")


def measure(bench: Bench, options: argparse.Namespace) -> Iterator[dict]:
    """Yield a row of each base, and of each format of the exports of the first base."""
    of_lora = [*LORA.split(), f"optimizer.lr={options.lr}"]
    bench.call(convert.main, "model", *of_lora)
    seeds, adapters = [f"train.seed={seed}" for seed in range(1, options.seeds + 1)], dict[str, Path]()
    for base in options.bases:
        lora = [*of_lora, f"model.base={base}"]
        out, before = bench.train("model", "first", 1, *lora, *STILL.split())
        error = json.loads((out / report.NAME).read_text().splitlines()[0])["error"] if base != "bf16" else 0.0

        def of_seed(seed: str, lora: list[str] = lora) -> tuple[Path, float]:
            return bench.train("model", "then", options.steps, *lora, seed)

        trained = dict(zip(seeds, bench.each(of_seed, seeds), strict=True))
        losses, served = [loss for _, loss in trained.values()], list[float | None]()
        folders = {seed: out for seed, (out, _) in trained.items()}
        try:
            served += _served(bench, base, lora, {seed: folders[seed] for seed in seeds[: options.serve]})
        except RuntimeError as refused:  # codes of this model that vLLM's format does not have
            print(f"not served: {refused}", flush=True)
        yield {"base": base, "error": error, "before": before, "losses": losses, "served": served}
        adapters = adapters or folders
    for form in options.exports:
        lora = [*of_lora, f"model.base={options.bases[0]}", f"export.quantization={form}"]
        losses, served = [], []
        for seed, adapter in adapters.items():
            made = bench.call(export.main, "model", *lora, seed, output=adapter)
            shipped = f"{form}-{made.name}"
            (made / "merged").rename(bench.folder / shipped)
            if len(served) < options.serve:
                served.append(bench.serve("model", *lora, served=bench.folder / shipped))
            bench.call(convert.main, shipped, *of_lora)
            losses.append(bench.train(shipped, "then", 1, *of_lora, *STILL.split())[1])
        yield {"base": f"export {form}", "losses": losses, "served": served}


def _served(bench: Bench, base: str, lora: list[str], adapters: dict[str, Path]) -> Iterator[float | None]:
    """Yield the loss in vLLM of each adapter: merged, or on the codes of its base."""
    if not adapters:
        return
    if base == "bf16":
        for seed, adapter in adapters.items():
            made = bench.call(export.main, "model", *lora, seed, output=adapter)
            yield bench.serve("model", *lora, seed, served=made / "merged")
        return
    lora += ["convert.to=packed", "evaluate.adapter=packed"]
    packed = bench.folder / f"packed-{base}"
    bench.call(convert.main, "model", *lora, base=packed)
    unused = bench.folder / "unused"  # the export of codes needs no training
    codes = bench.call(export.main, "model", *lora, *CODES.split(), base=packed, output=unused)
    for seed, adapter in adapters.items():
        keys = [*lora, seed, "export.formats=[adapter]"]
        made = bench.call(export.main, "model", *keys, base=packed, output=adapter)
        yield bench.serve(f"{codes.name}/merged", *lora, seed, export=made)


def table(rows: list[dict]) -> list[str]:
    plain = rows[0]["losses"]
    lines = [
        "| base | error | before, nats | after LoRA, nats | compared with bf16 | standard errors | served |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        pairs = [mine - other for mine, other in zip(row["losses"], plain, strict=True)]
        apart, spread = mean(pairs), _deviation(pairs) / len(pairs) ** 0.5
        compared = f"{100 * apart / mean(plain):+.2f} %" if row is not rows[0] else ""
        errors = f"{apart / spread:+.1f}" if spread else ""
        error, before = (
            f"{100 * row['error']:.2f} %" if "error" in row else "",
            f"{row['before']:.4f}" if "before" in row else "",
        )
        served = [loss for loss in row.get("served", []) if loss is not None]
        shown = [error, before, _shown(row["losses"]), compared, errors, _shown(served) if served else ""]
        lines.append(f"| {' | '.join([row['base'], *shown])} |")
    return lines


def _shown(losses: list[float]) -> str:
    return f"{mean(losses):.4f}" + (f" ± {_deviation(losses):.4f}" if len(losses) > 1 else "")


def _deviation(numbers: list[float]) -> float:
    """Return the standard deviation; 0 for a single number."""
    return stdev(numbers) if len(numbers) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="glm4-moe", help="of trainer.tiny (glm4-moe)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a released model instead")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="its rows, JSON lines with input and output")
    parser.add_argument("--pretrain", type=int, default=400, metavar="N", help="steps of the whole model (400)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of LoRA (60)")
    parser.add_argument("--lr", type=float, default=2e-3, help="of LoRA (2e-3)")
    parser.add_argument("--held-out", type=int, default=256, metavar="N", help="rows that are not trained on (256)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--bases", nargs="*", default=list(BASES), metavar="BASE", help="the first is compared with")
    parser.add_argument("--exports", nargs="*", default=list(EXPORTS), metavar="FORMAT", help="of the first base")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of all runs")
    parser.add_argument("--serve", type=int, default=0, metavar="N", help="seeds whose models vLLM reads too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--short", action="store_true", help="as --pretrain 100 --steps 20 --seeds 1")
    options = parser.parse_args()
    if (options.model is None) != (options.rows is None):
        parser.error("--model and --rows are given together")
    if options.short:
        options.pretrain, options.steps, options.seeds = 100, 20, 1
    if not device.has_gpu():
        forked_ranks.import_all()
    rows = list[dict]()
    with workspace("packed-quality") as folder:
        bench = Bench(folder, options.set, options.held_out)
        if options.model:
            take_model(bench, options.model, options.rows)
        else:
            make_model(bench, options.kind, options.pretrain)
        for row in measure(bench, options):
            rows.append(row)
            print(json.dumps(row), flush=True)
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "options": vars(options)}, indent=1, default=str))


if __name__ == "__main__":
    main()
