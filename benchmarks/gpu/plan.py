"""Compare the plan's figures with this host's GPUs: real steps of models with fewer layers, next to their plans.

    benchmarks/gpu/run plan.py OUT [--gpus N] [--only PART ...] [--minutes M]       9 minutes on one H200
    python benchmarks/gpu/plan.py --list                                            what would run, and what is planned
    of it

Each trial is python -m trainer.trial in a process of its own, with a time limit; one that fails, is too slow or runs
out of memory is a row like any other. OUT/plan.json gets a row after each, OUT/plan.txt the table.

    memory    settings that were not used to fit constants of conf/planner/
    rows      what was measured with bare Megatron-Bridge: GPT2-large, and 6 layers of GLM-4.7
    spread    layers of large models over two GPUs in every way
    levers    FP8 and the optimizer's, of the same models

Trials with another number of GPUs than --gpus (1) are skipped, and so are trials that would begin after M minutes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 110  # most that a trial may take; 20 to 60 is usual
ALONE = {f"layout.{key}": "1" for key in ("nodes", "gpus_per_node", "tp", "pp", "cp", "ep", "etp")}
ALONE |= {f"layout.{key}": "null" for key in ("vpp", "first_stage_layers", "last_stage_layers")}
ALONE |= {"layout.sp": "false", "data.packed": "false"}
SHOWN = ("seconds", "allocated", "reserved", "device")


class Trial(NamedTuple):
    name: str
    group: str
    conf: str
    layers: int | None
    changes: str
    steps: int = 5
    known: tuple[float, float] | None = None  # what was measured elsewhere: seconds, GB allocated

    @property
    def overrides(self) -> dict[str, str]:
        return ALONE | dict(pair.split("=", 1) for pair in self.changes.split())

    @property
    def gpus(self) -> int:
        return int(self.overrides["layout.gpus_per_node"])

    @property
    def command(self) -> list[str]:
        cut = ["--layers", str(self.layers)] if self.layers else []
        pairs = [f"{key}={value}" for key, value in self.overrides.items()]
        return ["-m", "trainer.trial", self.conf, "--steps", str(self.steps), *cut, "--json", *pairs]


def gpus(number: int, **degrees: object) -> str:
    return " ".join([f"layout.gpus_per_node={number}", *(f"layout.{key}={value}" for key, value in degrees.items())])


TWO = "train.micro_batch=1 train.global_batch=2"
FULL = f"adapter.kind=none {TWO}"
NONE, WHOLE = "train.recompute=none train.recompute_modules=[]", "train.recompute=full train.recompute_modules=[]"
CHEAP = "train.recompute=selective train.recompute_modules=[moe_act,layernorm]"
LORA = "adapter.kind=lora adapter.dropout=0"
SLICE = "model.mtp=false train.micro_batch=1 train.global_batch=8"
SPREAD = f"{LORA} {CHEAP} model.mtp=false train.micro_batch=1 train.global_batch=8"
GPT2 = "adapter.kind=none train.recompute=none"
BOTH = "train.global_batch=64 train.micro_batch=64"

TRIALS = (
    Trial("llama full, none", "memory", "llama31-70b", 3, f"{FULL} {NONE} data.seq_length=8192"),
    Trial("llama full, mlp", "memory", "llama31-70b", 3, f"{FULL} train.recompute=selective "
          "train.recompute_modules=[mlp,layernorm] data.seq_length=16384"),
    Trial("llama lora, none", "memory", "llama31-70b", 12, f"{LORA} {TWO} {NONE} data.seq_length=8192"),
    Trial("llama lora, full", "memory", "llama31-70b", 20, f"{LORA} {WHOLE} data.seq_length=8192 train.micro_batch=2 "
          "train.global_batch=2"),
    Trial("glm lora shared, none", "memory", "glm47", 5, f"model.mtp=false {TWO} {NONE}"),
    Trial("glm lora each, full, mtp", "memory", "glm47", 4, f"{TWO} {WHOLE} adapter.experts=each adapter.rank=32"),
    Trial("glm full, none", "memory", "glm47", 2, f"{FULL} {NONE} model.mtp=false data.seq_length=4096"),
    Trial("qwen full, none", "memory", "qwen3-235b", 2, f"{FULL} {NONE} data.seq_length=4096"),
    Trial("qwen lora, moe_act", "memory", "qwen3-235b", 10, f"{LORA} {TWO} {CHEAP} data.seq_length=4096"),
    Trial("deepseek lora, mla_up_proj, mtp", "memory", "deepseek-v3-64", 3, f"{LORA} {TWO} train.recompute=selective "
          "train.recompute_modules=[mla_up_proj,layernorm] data.seq_length=4096"),
    Trial("deepseek lora, full", "memory", "deepseek-v3-64", 4, f"{LORA} {TWO} {WHOLE} model.mtp=false "
          "data.seq_length=8192"),
    Trial("glm lora, packed", "memory", "glm47", 4, f"{LORA} {TWO} {CHEAP} model.mtp=false data.packed=true"),
    Trial("mixtral full, full", "memory", "mixtral-8x7b", 3, f"{FULL} {WHOLE} data.seq_length=4096"),
    Trial("glm slice, full", "rows", "glm47", 6, f"{SLICE} {WHOLE}", 5, (3.788, 52)),
    Trial("glm slice, moe_act layernorm", "rows", "glm47", 6, f"{SLICE} {CHEAP}", 5, (2.703, 68)),
    Trial("glm slice, full, fp8", "rows", "glm47", 6, f"{SLICE} {WHOLE} train.fp8=blockwise", 5, (5.337, 93)),
    Trial("gpt2", "rows", "gpt2-large", None, GPT2, 12, (0.450, 0)),
    Trial("gpt2 fp8 current", "rows", "gpt2-large", None, f"{GPT2} train.fp8=current", 12, (0.509, 0)),
    Trial("gpt2 fp8 delayed", "rows", "gpt2-large", None, f"{GPT2} train.fp8=delayed", 12, (0.467, 0)),
    Trial("gpt2 dp2", "rows", "gpt2-large", None, f"{GPT2} train.global_batch=64 {gpus(2)}", 12, (0.404, 0)),
    Trial("gpt2 tp2", "rows", "gpt2-large", None, f"{GPT2} {BOTH} {gpus(2, tp=2)}", 12, (0.500, 0)),
    Trial("gpt2 tp2 sp", "rows", "gpt2-large", None, f"{GPT2} {BOTH} {gpus(2, tp=2, sp='true')}", 12, (0.521, 0)),
    Trial("gpt2 cp2", "rows", "gpt2-large", None, f"{GPT2} {BOTH} {gpus(2, cp=2)}", 12, (0.525, 0)),
    Trial("gpt2 pp2", "rows", "gpt2-large", None, f"{GPT2} {BOTH} {gpus(2, pp=2)}", 12, (0.696, 0)),
    Trial("gpt2 pp2, 8 microbatches", "rows", "gpt2-large", None, f"{GPT2} train.global_batch=64 train.micro_batch=8 "
          f"{gpus(2, pp=2)}", 12, (1.010, 0)),
    Trial("glm lora ep2", "spread", "glm47", 6, f"{SPREAD} {gpus(2, ep=2)}"),
    Trial("glm lora tp2 sp ep2", "spread", "glm47", 6, f"{SPREAD} {gpus(2, tp=2, sp='true', ep=2)}"),
    Trial("glm lora cp2 ep2", "spread", "glm47", 6, f"{SPREAD} {gpus(2, cp=2, ep=2)}"),
    Trial("llama lora tp2 sp", "spread", "llama31-70b", 16, f"{SPREAD} {NONE} {gpus(2, tp=2, sp='true')}"),
    Trial("llama lora cp2", "spread", "llama31-70b", 16, f"{SPREAD} {NONE} {gpus(2, cp=2)}"),
    Trial("llama lora dp2", "spread", "llama31-70b", 16, f"{SPREAD} {NONE} {gpus(2)}"),
    Trial("qwen lora ep2", "spread", "qwen3-235b", 12, f"{SPREAD} {gpus(2, ep=2)} data.seq_length=4096"),
    Trial("qwen lora tp2 sp ep2", "spread", "qwen3-235b", 12, f"{SPREAD} {gpus(2, tp=2, sp='true', ep=2)} "
          "data.seq_length=4096"),
    Trial("llama full tp2 sp", "spread", "llama31-70b", 4, f"{SPREAD} {NONE} adapter.kind=none "
          f"{gpus(2, tp=2, sp='true')}"),
    Trial("glm lora pp2", "spread", "glm47", 6, f"{SPREAD} {gpus(2, pp=2)}"),
    Trial("qwen lora cp2 ep2", "spread", "qwen3-235b", 12, f"{SPREAD} {gpus(2, cp=2, ep=2)} data.seq_length=4096"),
    Trial("llama lora tp2", "spread", "llama31-70b", 16, f"{SPREAD} {NONE} {gpus(2, tp=2)}"),
    Trial("llama full, none, fp8", "levers", "llama31-70b", 3, f"{FULL} {NONE} data.seq_length=8192 train.fp8=current"),
    Trial("llama lora, full, fp8 weights", "levers", "llama31-70b", 20, f"{LORA} {TWO} {WHOLE} data.seq_length=8192 "
          "train.fp8=blockwise train.fp8_weights=true"),
    Trial("llama full, states in bf16", "levers", "llama31-70b", 3, f"{FULL} {NONE} data.seq_length=8192 "
          "optimizer.states=bf16"),
    Trial("llama full, half offloaded", "levers", "llama31-70b", 3, f"{FULL} {NONE} data.seq_length=8192 "
          "optimizer.offload=0.5"),
)  # fmt: skip


def main() -> int:
    options = _arguments()
    only = options.only or [""]
    chosen = [one for one in TRIALS if any(part in f"{one.group} {one.name}" for part in only)]
    if options.list:
        print("\n".join(f"{one.gpus} GPU  {one.group:7} {one.name:33} {planned(one)}" for one in chosen))
        return 0
    if not are_there(options.gpus):
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    started, rows = time.monotonic(), []
    for one in chosen:
        if one.gpus != options.gpus or time.monotonic() - started > options.minutes * 60:
            continue
        began = time.monotonic()
        row = {**take(one), "name": one.name, "group": one.group, "known": one.known}
        rows.append(row | {"took": round(time.monotonic() - began, 1)})
        print(line(rows[-1]), flush=True)
        (options.out / "plan.json").write_text(json.dumps(rows, indent=1) + "\n")
    head = f"{'':33}" + "".join(f"{name:>22}" for name in ("ms", "GB allocated", "GB reserved", "GB of device"))
    table = "\n".join([f"{head}   measured/planned = ratio", *map(line, rows)])
    (options.out / "plan.txt").write_text(table + "\n")
    print(f"\n{table}\n{len(rows)} trials in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0 if rows else 1


def take(one: Trial, variables: dict[str, str] | None = None, more: list[str] | None = None) -> dict[str, Any]:
    """The trial's answer, or the reason why there is none.

    `variables` are added to the environment, `more` to the command.
    """
    return answer([*one.command, *(more or [])], variables or {})


def answer(command: list[str], variables: dict[str, str], seconds: float = SECONDS) -> dict[str, Any]:
    """The JSON in the last line of a Python command's output, or the reason why there is none."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | variables
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            return {"failed": f"took more than {seconds:.0f} s", "stderr": errors[-2000:]}
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        said = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        return {"failed": said[-1][:160], "stderr": errors[-3000:]}


def line(row: dict[str, Any]) -> str:
    return f"{row['name']:33}" + "".join(f"{cell:>22}" for cell in cells(row)) + f"   {note(row)}"


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Cells of the rank that planned or measured most."""
    for key in SHOWN:
        both = [[rank[kind].get(key, 0) for rank in row.get("ranks", [])] for kind in ("measured", "planned")]
        measured, planned = (max(values, default=0) * (1e3 if key == "seconds" else 1e-9) for values in both)
        shown = f"{measured:.0f}/{planned:.0f}" if key == "seconds" else f"{measured:.1f}/{planned:.1f}"
        yield f"{shown} = {measured / planned:.2f}" if planned else shown


def note(row: dict[str, Any]) -> str:
    parts = [row.get("failed", ""), "out of memory" if row.get("out_of_memory") else ""]
    if row["known"]:
        seconds, size = row["known"]
        parts.append(f"known: {seconds * 1e3:.0f} ms" + f", {size} GB" * (size > 0))
    parts.append(f"{row['took']:.0f} s")
    return "; ".join(part for part in parts if part)


def are_there(gpus: int) -> bool:
    """Whether this host has so many GPUs; says how many there are where it has fewer."""
    count = "import sys, torch; sys.exit(torch.cuda.device_count())"
    there = subprocess.run([sys.executable, "-c", count]).returncode
    if there < gpus:
        print(f"--gpus: {gpus}, but torch sees {there} here", file=sys.stderr)
    return there >= gpus


def planned(one: Trial) -> str:
    """Planned figures on an H200."""
    sys.path.insert(0, str(ROOT))
    from conf.load import load
    from conf.model_facts import facts_from_hf
    from conf.planner.hardware import GPUS
    from conf.planner.memory import memory
    from conf.planner.timing import timing
    from conf.planner.verdict import config_of
    from contract.faults import ConfigError
    from trainer.trial import cut

    try:
        run = load(one.conf, [f"{key}={value}" for key, value in one.overrides.items()], illegal=True)
    except ConfigError as fault:
        return str(fault)
    config, _ = config_of(run)
    facts = facts_from_hf(cut(config, one.layers) if one.layers else config)
    fullest = max(memory(run, facts, GPUS["h200"]), key=lambda stage: stage.total)
    seconds = timing(run, facts, GPUS["h200"]).likely
    return f"{fullest.allocated / 1e9:6.1f} GB allocated, {fullest.total / 1e9:6.1f} GB, {seconds * 1e3:6.0f} ms a step"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of the results (default $OUT or runs/gpu)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="take the trials of so many GPUs (1)")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="of a group or name: rows, glm")
    parser.add_argument("--minutes", type=float, default=7.5, metavar="M", help="begin none after that (7.5)")
    parser.add_argument("--list", action="store_true", help="print what would run; needs no GPU")
    options = parser.parse_args()
    options.out = options.out or Path(os.environ.get("OUT", "runs/gpu"))
    return options


if __name__ == "__main__":
    sys.exit(main())
