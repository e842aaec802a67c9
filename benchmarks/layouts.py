"""Rehearse parallel layouts on this machine: each must train like a single process.

    python -m benchmarks.layouts [--only PART ...] [--steps N] [--workdir FOLDER]

Trains LoRA on tiny models in fp32 at each layout of TABLE, on up to 8 gloo processes, and prints the largest relative
difference of any step's loss from that of one process. B is drawn like A: with a B of zeros, as in real runs, adapters
would add nothing to the gradient of their input at first, and little after ten steps. Ends with one line of JSON;
exit code 1 if a layout is off by more than BOUND. About 10 minutes on 2 cores.

Importing Megatron takes longer than training here, so it is imported once, and the ranks of each layout are forked.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from conf.load import load
from conf.schema.run import Run
from contract import closed_pipe, output_marks
from contract.output_marks import Kind
from trainer import convert, train
from trainer.data import prepared
from trainer.rehearsal import forked_ranks, tiny_models
from trainer.startup import device, entry

BOUND = 1e-4
# Keys of models with more layers than the default targets.
OTHER_LAYERS = {"kv_lora_rank", "linear_num_key_heads", "mamba_num_heads"}
# With seed 0, two experts of a token differ by 6e-7 in the ninth step, so rounding chooses one, and with it the loss.
SEEDS = {"kimi-k2": 1}
FOLDER = Kind("rehearsals of layouts", "benchmarks.layouts", {"*/metrics.jsonl": {"kind", "step"}}, whole=False)


@dataclass(frozen=True)
class Case:
    model: str
    cut: str  # key=value pairs of layout; processes are counted from them
    packed: bool = False
    shared: bool = False  # adapter.experts: shared
    base: str = "bf16"  # model.base

    @property
    def name(self) -> str:
        return " ".join((self.model, self.cut.replace("=true", "").replace("=", "") or "single", *self.flags()))

    def flags(self) -> list[str]:
        base = [] if self.base == "bf16" else [f"{self.base}-base"]
        return [name for name in ("packed", "shared") if getattr(self, name)] + base


DENSE = ("dp=2", "tp=2", "tp=2 sp=true", "pp=2", "pp=2 vpp=2", "cp=2", "tp=2 sp=true pp=2 cp=2")
MOE = (
    "dp=2",
    "tp=2 sp=true",
    "pp=2",
    "pp=4",
    "pp=2 vpp=2",
    "cp=2",
    "ep=2",
    "ep=4",
    "tp=2 sp=true etp=2",
    "tp=2 sp=true ep=2",
    "pp=2 ep=2",
    "pp=2 vpp=2 ep=2",
    "cp=2 ep=2",
    "tp=2 sp=true pp=2 ep=2",
    "tp=2 sp=true ep=2 etp=2",
    "tp=2 sp=true pp=2 ep=2 etp=2 dp=2",
    "tp=2 sp=true pp=2 cp=2 ep=4",
)
SHARED = ("dp=2", "ep=4", "pp=2 ep=2", "tp=2 sp=true ep=2", "tp=2 sp=true etp=2", "tp=2 sp=true ep=2 etp=2")
TABLE = (
    *(Case("llama", cut) for cut in DENSE),
    *(Case("llama", cut, packed=True) for cut in ("dp=2", "tp=2 sp=true", "pp=2", "pp=4", "pp=2 vpp=2", "cp=2")),
    *(Case("glm4-moe", cut) for cut in MOE),
    *(Case("glm4-moe", cut, packed=True) for cut in ("dp=2", "tp=2 sp=true", "pp=2", "pp=4", "cp=2", "ep=2")),
    *(Case("glm4-moe", cut, shared=True) for cut in SHARED),
    *(Case("glm4-moe-mtp", cut) for cut in ("dp=2", "tp=2 sp=true", "pp=2", "ep=2", "cp=2")),
    *(Case("glm4-moe-mtp", cut, packed=True) for cut in ("dp=2", "pp=2", "cp=2")),
    *(Case("qwen3-moe", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "cp=2")),
    *(Case("qwen3", cut) for cut in ("tp=2 sp=true", "pp=2", "pp=2 vpp=2", "cp=2", "tp=2 sp=true pp=2 cp=2")),
    Case("qwen3", "pp=2", packed=True),
    *(Case("mixtral", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "cp=2", "tp=2 sp=true etp=2")),
    *(Case("qwen2-moe", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "cp=2", "pp=2 vpp=2")),
    *(Case("gpt2", cut) for cut in ("tp=2 sp=true", "pp=2", "cp=2", "tp=2")),
    *(Case("gpt2", cut, packed=True) for cut in ("tp=2 sp=true", "pp=2", "cp=2")),
    *(Case(model, "ep=2", packed=True) for model in ("mixtral", "qwen2-moe")),
    *(
        Case(model, cut)
        for model in ("deepseek-v3", "kimi-k2", "olmoe", "minimax-m2", "qwen3-next", "qwen3-5-moe")
        for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "cp=2")
    ),
    *(
        Case(model, cut)
        for model in ("qwen3-next-mtp", "qwen3-5-moe-mtp", "nemotron-h-mtp")
        for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "dp=2")
    ),
    *(Case("qwen3-5-mtp", cut) for cut in ("tp=2 sp=true", "dp=2", "cp=2")),
    *(Case("qwen3-next-mtp", cut, packed=True) for cut in ("dp=2", "cp=2")),
    # the tiny model has an MTP layer, like the releases
    *(Case("glm4-moe-lite", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "ep=2", "cp=2")),
    *(Case(model, cut) for model in ("qwen2", "mistral", "qwen3-5") for cut in ("tp=2 sp=true", "pp=2", "cp=2")),
    *(Case(model, cut) for model in ("gemma3-text", "gemma3") for cut in ("tp=2 sp=true", "pp=2 vpp=2", "dp=2")),
    Case("gemma3-text", "pp=2", packed=True),
    *(Case("nemotron-h", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 vpp=2 ep=2", "cp=2", "dp=2")),
    *(Case("nemotron-h-latent", cut) for cut in ("tp=2 sp=true etp=2", "pp=4", "ep=2")),
    Case("qwen3-next", "ep=2", base="fp8"),
    *(Case("nemotron-h-latent", cut, base="fp8") for cut in ("tp=2 sp=true etp=2", "ep=2")),
    *(Case("nemotron-h-mtp", cut, base="fp8") for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2")),
    *(Case("nemotron-h", cut, packed=True) for cut in ("tp=2 sp=true", "pp=2", "cp=2")),
    *(Case("nemotron-h-mtp", cut, packed=True) for cut in ("tp=2 sp=true etp=2", "pp=2 vpp=2 ep=2", "cp=2")),
    *(Case("gemma4-text", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "tp=2 sp=true", "dp=2", "ep=4")),
    Case("gemma4-text", "ep=2", packed=True),
    *(Case("gemma4", cut) for cut in ("tp=2 sp=true", "tp=2", "dp=2")),
    Case("gemma4", "dp=2", packed=True),
    *(Case("gpt-oss", cut) for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "tp=2 sp=true", "dp=2", "ep=4")),
    Case("gpt-oss", "ep=2", packed=True),
    *(Case("glm4-moe", cut, base="fp8") for cut in ("dp=2", "tp=2 sp=true etp=2", "pp=2 vpp=2 ep=2", "cp=2")),
    *(Case("glm4-moe-mtp", cut, base="int4") for cut in ("ep=4", "tp=2 sp=true etp=2", "pp=2")),
    *(Case("llama", cut, base=base) for base in ("fp8", "int4") for cut in ("tp=2 sp=true", "pp=2")),
    *(Case("glm4-moe", cut, base="nvfp4") for cut in ("tp=2 sp=true etp=2", "pp=2 ep=2", "cp=2")),
    Case("llama", "tp=2 sp=true", base="mxfp4"),
    *(Case("qwen3-next-mtp", cut, base="fp8") for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2")),
    *(Case("deepseek-v3", cut, base="int4") for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2")),
    *(Case("gpt-oss", cut, base="mxfp4") for cut in ("tp=2 sp=true ep=2", "pp=2 ep=2", "ep=4")),
    *(Case("glm4-moe", cut, packed=True, base="int4") for cut in ("tp=2 sp=true ep=2", "pp=4", "cp=2")),
    Case("glm4-moe", "tp=2 sp=true pp=2 ep=2 etp=2 dp=2", base="nvfp4"),
)


def main() -> None:
    options = _arguments()
    cases = [case for case in TABLE if all(part in case.name.split() for part in options.only)]
    if not cases:
        sys.exit(f"error: no layout matches {' '.join(options.only)}")
    with contextlib.ExitStack() as stack:
        folder = options.workdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layouts-")))
        with entry.faults_in_one_line():
            output_marks.take(folder, FOLDER)
        forked_ranks.import_all()
        rows = _rehearse(cases, folder, options.steps)
    missed = [row for row in rows if not row["ok"]]
    print(json.dumps({"command": "layouts", "bound": BOUND, "missed": len(missed), "rows": rows}))
    sys.exit(1 if missed else 0)


def _rehearse(cases: list[Case], folder: Path, steps: int) -> list[dict]:
    print(f"{'layout':58} {'processes':>9} {'difference':>11} {'seconds':>8}")
    references: dict[Case, list[float]] = {}
    rows = []
    for case in cases:
        single = replace(case, cut="")
        if single not in references:
            prepare(case.model, case.packed, folder)
            references[single] = losses(single, folder, steps)
        started = time.monotonic()
        found, expected = losses(case, folder, steps), references[single]
        pairs = zip(found, expected, strict=True) if len(found) == len(expected) else ()
        difference = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
        ok = difference <= BOUND
        row = {
            "layout": case.name,
            "processes": configured(case, folder, steps).world,
            "difference": difference,
            "ok": ok,
        }
        rows.append(row)
        note = "" if ok else "  MISSED"
        seconds = time.monotonic() - started
        print(f"{case.name:58} {row['processes']:9} {difference:11.1e} {seconds:8.1f}{note}", flush=True)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="such as: glm4-moe ep2 packed")
    parser.add_argument("--steps", type=int, default=10, help="training steps per layout (default 10)")
    parser.add_argument("--workdir", type=Path, help="keep models, metrics and logs here")
    return parser.parse_args()


def prepare(model: str, packed: bool, folder: Path) -> None:
    if not (folder / model).exists():
        tiny_models.make_model(model, folder / model, SEEDS.get(model, 0), dtype="float32")
    if not (folder / "given").exists():
        tiny_models.make_data(folder / "given", rows=64)
    if not (folder / f"{model}-base").exists():
        forked_ranks.call(convert.main, configured(Case(model, ""), folder, 1), folder / f"{model}-base.log")
    run = configured(Case(model, "", packed), folder, 1)
    if not Path(run.paths.data).exists():
        paths = {"data": str(folder / "given"), "output": str(Path(run.paths.data).parent)}
        given = run.model_copy(update={"paths": run.paths.model_copy(update=paths)})
        forked_ranks.call(prepared.make, given, folder / f"{model}-data.log")


def configured(case: Case, folder: Path, steps: int) -> Run:
    cut = dict(pair.split("=") for pair in case.cut.split())
    copies = int(cut.pop("dp", 1))
    world = copies
    for key in ("tp", "pp", "cp"):
        world *= int(cut.get(key, 1))
    experts = int(cut.get("ep", 1)) * int(cut.get("etp", 1)) * int(cut.get("pp", 1))
    world = max(world, experts)
    output = folder / case.name.replace(" ", "-")
    return load(
        folder / "layouts.yaml" if (folder / "layouts.yaml").exists() else _write_conf(folder),
        [
            f"paths.model={folder / case.model}",
            f"paths.base={folder / case.model}-base",
            f"paths.data={folder / case.model}-prepared{'-packed' if case.packed else ''}/data",
            f"paths.output={output}",
            f"layout.gpus_per_node={world}",
            f"data.packed={str(case.packed).lower()}",
            f"adapter.experts={'shared' if case.shared else 'each'}",
            f"model.base={case.base}",
            f"train.steps={steps}",
            f"checkpoint.save_every={steps}",
            *(f"layout.{key}={value}" for key, value in cut.items()),
            *(["adapter.targets=all-linear"] if OTHER_LAYERS & tiny_models.KINDS[case.model].keys() else []),
        ],
    )


def _write_conf(folder: Path) -> Path:
    path = folder / "layouts.yaml"
    path.write_text(
        "name: layouts\nmodel: {source: made by trainer.tiny}\n"
        'data: {seq_length: 64, template: "{input} {output}"}\n'
        "adapter: {rank: 8, alpha: 16}\ntrain: {steps: 10, global_batch: 4, precision: fp32}\n"
        "optimizer: {lr: 1e-3}\ncheckpoint: {save_every: 10}\n"
    )
    return path


def _train(run: Run) -> None:
    device.start()
    from trainer.megatron import adapters

    adapters.SPREAD_OF_B = 1.0
    train.main(run)


def losses(case: Case, folder: Path, steps: int) -> list[float]:
    run = configured(case, folder, steps)
    output, log = Path(run.paths.output), Path(run.paths.output).with_suffix(".log")
    shutil.rmtree(output, ignore_errors=True)
    if forked_ranks.call(_train, run, log):
        print("".join(log.read_text().splitlines(keepends=True)[-5:]), end="", file=sys.stderr)
    path = output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["lm_loss"] for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    with closed_pipe.quiet():
        main()
