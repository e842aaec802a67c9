"""Compare steps of large models with and without a speed setting ("lever") on this host's GPUs.

    benchmarks/gpu/run levers.py OUT [--gpus N] [--rows PART ...] [--levers PART ...] [--steps S] [--profile]
    python benchmarks/gpu/levers.py --list [...]        what would run, and what is planned of it on an H200

Each row is a model, cut to a few layers; each lever an environment or keys that are tried on it, "base" none of them.
A trial (python -m trainer.trial) takes 30 to 60 s. Each prints a line of JSON as it ends, which OUT/levers.jsonl gets
too, so that a call that is cut off still has its rows: milliseconds of a step, of all measured steps, losses of every
step, allocated GB, and each beside base's. The levers of a row come one after another. OUT/levers.txt gets the table.

With --profile each trial is recorded as well: OUT/ROW-LEVER/profile.html, and the verdict in the line. Trials that
would begin after M minutes are skipped, and so are rows of more GPUs than N, and levers that do not apply to a row.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plan import CHEAP, NONE, WHOLE, Trial, are_there, gpus, planned, take

AIR = f"adapter.rank=128 adapter.alpha=128 adapter.dropout=0 data.seq_length=8192 {CHEAP} model.mtp=false"
AIR += " train.micro_batch=1 train.global_batch=8"
LLAMA = f"adapter.kind=lora adapter.dropout=0 data.seq_length=4096 {NONE} train.micro_batch=1 train.global_batch=8"
QWEN = "adapter.rank=8 adapter.targets=[linear_qkv,linear_proj] adapter.dropout=0 data.seq_length=2048"
QWEN += f" train.micro_batch=4 train.global_batch=16 {CHEAP}"
DENSE = f"adapter.dropout=0 data.seq_length=4096 train.micro_batch=2 train.global_batch=8 {NONE}"
TP2 = gpus(2, tp=2, sp="true")


class Row(NamedTuple):
    name: str
    conf: str
    layers: int | None
    changes: str

    @property
    def gpus(self) -> int:
        return Trial(self.name, "", self.conf, self.layers, self.changes).gpus


class Lever(NamedTuple):
    name: str
    means: str
    environment: str = ""
    changes: str = ""
    only: tuple[str, ...] = ()  # beginnings of the rows that it goes with; none: all

    def goes_with(self, row: Row) -> bool:
        return not self.only or row.name.startswith(self.only)


ROWS = (
    Row("air-ep2", "glm45-air-8xh200", 12, f"{AIR} {gpus(2, ep=2)}"),
    Row("air-tp2-sp-ep2", "glm45-air-8xh200", 12, f"{AIR} {gpus(2, tp=2, sp='true', ep=2)}"),
    Row("llama70b-tp2-sp", "llama31-70b", 8, f"{LLAMA} {TP2}"),
    Row("llama70b-pp2", "llama31-70b", 8, f"{LLAMA} {gpus(2, pp=2, vpp=4)}"),
    Row("qwen30b-ep2", "qwen3-30b-a3b-1xh200", None, f"{QWEN} {gpus(2, ep=2)}"),
    Row("qwen30b", "qwen3-30b-a3b-1xh200", None, QWEN),
    Row("qwen30b-all-linear", "qwen3-30b-a3b-1xh200", 24, f"adapter.rank=32 adapter.dropout=0 data.seq_length=4096 "
        f"train.micro_batch=1 train.global_batch=4 {CHEAP}"),
    Row("qwen30b-each", "qwen3-30b-a3b-1xh200", 12, f"adapter.rank=32 adapter.dropout=0 data.seq_length=4096 "
        f"adapter.experts=each train.micro_batch=2 train.global_batch=8 {CHEAP}"),
    Row("dense8b", "llama31-8b-1xh100", None, DENSE),
    Row("dense8b-fp8", "llama31-8b-1xh100", None, f"{DENSE} train.fp8=current"),
    Row("gpt2", "gpt2-large", None, "adapter.kind=none train.recompute=none"),
    Row("gpt2-dp2", "gpt2-large", None, f"adapter.kind=none train.recompute=none train.global_batch=64 {gpus(2)}"),
)  # fmt: skip
EXPERTS = ("air", "qwen30b")
LEVERS = (
    Lever("base", "as it is"),
    Lever("no-grouped", "a kernel for each expert's product", "NVTE_USE_CUTLASS_GROUPED_GEMM=0", only=EXPERTS),
    Lever("connections-8", "8 queues to the device", "CUDA_DEVICE_MAX_CONNECTIONS=8"),
    Lever("connections-32", "32 queues to the device", "CUDA_DEVICE_MAX_CONNECTIONS=32"),
    Lever("connections-1", "one queue to the device", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    Lever("no-priority", "collectives go first no more", "TORCH_NCCL_HIGH_PRIORITY=0"),
    Lever("no-margin", "norms use all multiprocessors",
          "NVTE_FWD_LAYERNORM_SM_MARGIN=0 NVTE_BWD_LAYERNORM_SM_MARGIN=0"),
    Lever("bridge-lora", "Megatron-Bridge's adapters instead of lean ones", changes="adapter.lean=false",
          only=("air", "llama", "qwen", "dense")),
    Lever("full", "every layer recomputed", changes=WHOLE),
    Lever("first-6", "the first 6 layers of a stage recomputed", changes=f"{WHOLE} train.recompute_first=6",
          only=("air",)),
)  # fmt: skip


def main() -> int:
    options = _arguments()
    chosen = list(_chosen(options))
    if options.list:
        for row, lever in chosen:
            print(f"{row.gpus} GPU  {row.name:20} {lever.name:16} {planned(_trial(row, lever, options))}")
        return 0
    if not are_there(options.gpus):
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    started, rows = time.monotonic(), []
    with (options.out / "levers.jsonl").open("a") as file:
        for row, lever in chosen:
            if time.monotonic() - started > options.minutes * 60:
                break
            rows.append(measured(row, lever, options, rows))
            text = json.dumps(rows[-1])
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()
    table = "\n".join(lines(rows))
    (options.out / "levers.txt").write_text(table + "\n")
    print(f"{table}\n{len(rows)} of {len(chosen)} trials in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0 if rows else 1


def _chosen(options: argparse.Namespace) -> Iterator[tuple[Row, Lever]]:
    for row in ROWS:
        if row.gpus > options.gpus or not _named(row.name, options.rows):
            continue
        for lever in LEVERS:
            if lever.goes_with(row) and (lever.name == "base" or _named(lever.name, options.levers)):
                yield row, lever


def _named(name: str, parts: list[str]) -> bool:
    return not parts or any(name.startswith(part) for part in parts)


def _trial(row: Row, lever: Lever, options: argparse.Namespace) -> Trial:
    changes = f"{row.changes} {lever.changes}".strip()
    return Trial(f"{row.name} {lever.name}", "", row.conf, row.layers, changes, options.steps)


def measured(row: Row, lever: Lever, options: argparse.Namespace, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of a trial, beside that of the row's base."""
    began = time.monotonic()
    given = dict(pair.split("=", 1) for pair in lever.environment.split())
    more = ["--profile-to", str(options.out / f"{row.name}-{lever.name}")] if options.profile else []
    answer = take(_trial(row, lever, options), given, more)
    found = {"row": row.name, "lever": lever.name, "gpus": row.gpus, "took": round(time.monotonic() - began, 1)}
    if "ranks" not in answer:
        return found | {"failed": answer["failed"]}
    if answer["out_of_memory"]:
        return found | {"failed": "out of memory"}
    slowest = max(answer["ranks"], key=lambda one: one["measured"]["seconds"])
    found["ms"] = round(slowest["measured"]["seconds"] * 1e3, 1)
    found["all_ms"] = [round(seconds * 1e3, 1) for seconds in slowest["seconds"]]
    found["planned_ms"] = round(slowest["planned"].get("seconds", 0) * 1e3, 1)
    found["gb"] = round(max(one["measured"].get("allocated", 0) for one in answer["ranks"]) / 1e9, 2)
    found["losses"] = next((one["losses"] for one in reversed(answer["ranks"]) if one["losses"]), [])
    if profile := answer.get("profile"):
        found["profile"] = _profile(profile)
    base = next((one for one in before if one["row"] == row.name and one["lever"] == "base" and "ms" in one), None)
    if base:
        pairs = zip(found["losses"], base["losses"], strict=False)
        found["times_base"] = round(found["ms"] / base["ms"], 3)
        found["losses_differ"] = max((abs(mine - its) / abs(its) for mine, its in pairs), default=None)
    return found


def _profile(profile: dict[str, Any]) -> dict[str, Any]:
    least = min(profile["ranks"], key=lambda one: one["computing"])
    idle = {cause: row["share"] for cause, row in least["idle"].items()}
    kernels = sum(one["count"] for one in least["kernels"])
    shares = {key: least[key] for key in ("busy", "computing", "communication", "exposed", "lead_us", "host")}
    return shares | {"idle": idle, "kernels": kernels, "slowed": profile.get("slowed"), "page": profile["page"]}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'row':20} {'lever':16} {'ms':>9} {'of base':>8} {'GB':>7} {'losses differ':>14}  took"
    for row in rows:
        head = f"{row['row']:20} {row['lever']:16} "
        if "failed" in row:
            yield head + row["failed"]
            continue
        times, apart = (row.get(key) for key in ("times_base", "losses_differ"))
        cells = [f"{row['ms']:9.1f}", f"{'' if times is None else format(times, '.3f'):>8}", f"{row['gb']:7.1f}"]
        yield head + " ".join([*cells, f"{'' if apart is None else format(apart, '.1e'):>14}", f" {row['took']:.0f} s"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = " ".join(lever.name for lever in LEVERS[1:])
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of the results (default $OUT or runs/gpu)")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="GPUs that a trial may have (2)")
    parser.add_argument("--rows", nargs="*", default=[], metavar="PART", help="by name, or how it begins: air, gpt2")
    parser.add_argument("--levers", nargs="*", default=["no-grouped"], metavar="PART", help=f"of {names}; base always")
    parser.add_argument("--steps", type=int, default=6, metavar="S", help="of a trial (6)")
    parser.add_argument("--minutes", type=float, default=8.5, metavar="M", help="begin none after that (8.5)")
    parser.add_argument("--profile", action="store_true", help="record a step of each trial as well")
    parser.add_argument("--list", action="store_true", help="print what would run; needs no GPU")
    options = parser.parse_args()
    options.out = (options.out or Path(os.environ.get("OUT", "runs/gpu"))).absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
