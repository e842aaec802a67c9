"""Quality of adapters on a packed base (model.base), compared with the unpacked base, over several seeds.

    python -m benchmarks.packed_quality             five seeds of each base: 19 minutes     make bench-packed
    python -m benchmarks.packed_quality --short     one seed and fewer steps: 4 minutes     make bench-packed SHORT=1

All weights of a tiny model are trained in fp32 until it answers a ticket (trainer/data/tickets.py) with its team and
order. Then LoRA trains it to answer another question with both in the opposite order, on each base and with each seed.
The output has for each base: its rounding error (trainer/weights/quantised/report.py); the loss of held-out rows in
nats per token before and after LoRA, with mean and standard deviation over the seeds; and the distance of this mean
from bf16's, in standard errors of the difference of pairs with the same seed. One seed has no deviation and no error.

Not covered: models of real widths, whose weights have other outliers, and sampled answers.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.workspace import workspace
from conf.load import load
from conf.rules.packed_base import FORMATS
from conf.schema.run import Run
from trainer import convert, export, train
from trainer.data import prepared
from trainer.data.tickets import tickets
from trainer.rehearsal import forked_ranks, tiny_models
from trainer.weights.quantised import report

BASES = ("bf16", *FORMATS)
ROWS, HELD_OUT = 1600, 256
CONF = """
name: quality
model: {source: made by trainer.tiny, compare: false}
data: {seq_length: 96, template: "{input} {output}"}
train: {steps: 1000, global_batch: 16, micro_batch: 16, precision: fp32, validate_batches: 16}
optimizer: {lr: 1e-3}
checkpoint: {save_every: 100000}
"""
WHOLE = "adapter.kind=none optimizer.lr=1e-3 optimizer.warmup_steps=20"
LORA = "adapter.rank=16 adapter.alpha=32 optimizer.lr=2e-3 optimizer.warmup_steps=5"


class Bench:
    def __init__(self, folder: Path, kind: str):
        self.folder, self.count = folder, 0
        (folder / "conf.yaml").write_text(CONF)
        tiny_models.make_model(kind, folder / "drawn", dtype="float32")
        for name, question, answer in (("first", "Team and order:", "{1} {0}"), ("then", "Who wants what:", "{0} {1}")):
            write(folder / f"{name}-given", question, answer)
            self.call(prepared.make, "drawn", data=folder / f"{name}-given", output=folder / name)

    def call(self, command: Callable[[Run], Any], model: str, *overrides: str, **places: Path) -> Path:
        """Run a command of the trainer on this model, and return the folder of its output."""
        self.count += 1
        out = self.folder / f"{self.count:02}"
        usual = {"model": self.folder / model, "base": self.folder / f"{model}-base", "output": out, "export": out}
        paths = [f"paths.{key}={place}" for key, place in (usual | {"logs": out.with_suffix(".logs")} | places).items()]
        given = dict(one.split("=", 1) for one in (*paths, *overrides))  # the last of a key counts
        run = load(self.folder / "conf.yaml", [f"{key}={value}" for key, value in given.items()])
        log = self.folder / f"{self.count:02}.log"
        if forked_ranks.call(command, run, log):
            sys.exit(f"error: {command.__module__} failed:\n{log.read_text()[-3000:]}")
        return out

    def train(self, model: str, data: str, steps: int, *overrides: str) -> tuple[Path, float]:
        """Train, and return the output's folder and the loss of held-out rows."""
        more = [f"train.steps={steps}", f"train.validate_every={steps}", *overrides]
        out = self.call(train.main, model, *more, data=self.folder / data / "data")
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return out, [line["lm_loss"] for line in lines if line["kind"] == "validation"][-1]


def write(folder: Path, question: str, answer: str) -> None:
    rows = []
    for number, (ticket, team) in enumerate(tickets(ROWS + HELD_OUT, 1).items()):
        found = re.search(r"\d{4}", ticket)
        assert found, f"ticket {number} has no order"
        text = ticket.removesuffix("Team:") + question
        rows.append(json.dumps({"input": text, "output": answer.format(found[0], team)}) + "\n")
    random.Random(1).shuffle(rows)
    folder.mkdir()
    (folder / "training.jsonl").write_text("".join(rows[:ROWS]))
    (folder / "validation.jsonl").write_text("".join(rows[ROWS:]))


def measure(bench: Bench, options: argparse.Namespace) -> list[dict]:
    bench.call(convert.main, "drawn", *WHOLE.split())
    out, known = bench.train("drawn", "first", options.pretrain, *WHOLE.split())
    print(f"pretrained for {options.pretrain} steps: {known:.4f} nats a token of held-out rows", flush=True)
    made = bench.call(export.main, "drawn", *WHOLE.split(), output=out)
    (made / "merged").rename(bench.folder / "model")
    bench.call(convert.main, "model", *LORA.split())
    rows = []
    for base in options.bases:
        lora = [*LORA.split(), f"model.base={base}"]
        out, before = bench.train("model", "first", 1, *lora, "optimizer.lr=1e-12", "optimizer.warmup_steps=0")
        error = json.loads((out / report.NAME).read_text().splitlines()[0])["error"] if base != "bf16" else 0.0
        seeds = range(1, options.seeds + 1)
        losses = [bench.train("model", "then", options.steps, *lora, f"train.seed={seed}")[1] for seed in seeds]
        rows.append({"base": base, "error": error, "before": before, "losses": losses})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict]) -> list[str]:
    plain = rows[0]["losses"]
    lines = [
        "| base | error | before, nats | after LoRA, nats | beside bf16 | standard errors |",
        "|" + "---|" * 6,
    ]
    for row in rows:
        pairs = [mine - other for mine, other in zip(row["losses"], plain, strict=True)]
        apart, spread = mean(pairs), _deviation(pairs) / len(pairs) ** 0.5
        beside = f"{100 * apart / mean(plain):+.2f} %" if row is not rows[0] else ""
        errors = f"{apart / spread:+.1f}" if spread else ""
        after = f"{mean(row['losses']):.4f}" + (f" ± {_deviation(row['losses']):.4f}" if len(pairs) > 1 else "")
        base = f"{row['base']} | {100 * row['error']:.2f} % | {row['before']:.4f}"
        lines.append(f"| {base} | {after} | {beside} | {errors} |")
    return lines


def _deviation(numbers: list[float]) -> float:
    """Return the standard deviation; 0 for a single number."""
    return stdev(numbers) if len(numbers) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="glm4-moe", help="of trainer.tiny (glm4-moe)")
    parser.add_argument("--pretrain", type=int, default=400, metavar="N", help="steps of the whole model (400)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of LoRA (60)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--bases", nargs="*", default=list(BASES), metavar="BASE", help="the first is compared with")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--short", action="store_true", help="as --pretrain 100 --steps 20 --seeds 1")
    options = parser.parse_args()
    if options.short:
        options.pretrain, options.steps, options.seeds = 100, 20, 1
    forked_ranks.import_all()
    with workspace("packed-quality") as folder:
        rows = measure(Bench(folder, options.kind), options)
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "options": vars(options) | {"json": None}}, indent=1))


if __name__ == "__main__":
    main()
