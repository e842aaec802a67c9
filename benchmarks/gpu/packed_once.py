"""A base that is packed once, on this host's GPU, beside one that is packed at each start; and a merge onto it.

    benchmarks/gpu/run packed_once.py OUT                            about 4 minutes on one H100 or H200, 12 GB of disk
    python benchmarks/gpu/packed_once.py OUT --size tiny             rehearses it on a CPU in 2 minutes

A Qwen3-MoE of 1.6 billion random weights in bf16 (tiny: 230 thousand) is converted with convert.to packed, its first
layers compared with transformers' on the way, and trained to its end; then converted with convert.to none, and trained
so, packed on the GPU at the start. Both have the same codes, so the first loss is the same to the last bit, and later
ones as far as a GPU repeats its sums. The first is exported by export.merge_onto packed, which compares the codes that
a CPU reads with what training has found, and proven by trainer.proof. OUT/packed-once.json has seconds, bytes, losses
and the last lines of each command; OUT/logs all of them. Exit code 1 where a command fails or losses are apart.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import whole_flow
from serving import gpus_here

ROOT = Path(__file__).resolve().parents[2]
CONF = """\
name: packed-once
model: {{source: {work}/model, base: {base}}}
data: {{source: {work}/rows.jsonl, seq_length: {length}, packed: true, template: "{{input}} {{output}}",
  validation: 0.05, test: 0.04}}
adapter: {{rank: 16, alpha: 32}}
train: {{steps: 6, global_batch: 8, micro_batch: 1, precision: {precision}, validate_every: 0}}
optimizer: {{lr: 1e-3, warmup_steps: 1}}
checkpoint: {{save_every: 6}}
"""
BOUND = 1e-3  # of a loss
LAST = 400  # characters of a line that is kept


class Bench:
    """Commands, one after another, and what became of each."""

    def __init__(self, work: Path, out: Path, until: float):
        self.work, self.until, self.logs = work, until, out / "logs"
        self.found: dict[str, dict[str, Any]] = {}
        self.logs.mkdir(parents=True, exist_ok=True)

    def command(self, shown: str, name: str, way: str, *changes: str) -> bool:
        """Whether the command ended well; none is begun behind one that did not, or with too little time."""
        if any(one["code"] for one in self.found.values()):
            return False
        paths = {"model": "model", "data": "data"} | {
            key: f"{way}/{key}" for key in ("base", "output", "export", "logs")
        }
        arguments = [f"paths.{key}={self.work / place}" for key, place in paths.items()]
        arguments += [f"paths.parity={self.work / way}/output/parity.json", f"convert.to={way}", *changes]
        line = [sys.executable, "-m", f"trainer.{name}", str(self.work / "conf.yaml"), *arguments]
        log, began = self.logs / f"{shown.replace(', ', '-').replace(' ', '-')}.log", time.monotonic()
        with log.open("w") as file:
            own = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            try:
                left = max(1.0, self.until - began)
                code = subprocess.run(line, cwd=ROOT, env=own, stdout=file, stderr=file, timeout=left).returncode
            except subprocess.TimeoutExpired:
                code = -1
        said = [text[:LAST] for text in log.read_text(errors="replace").splitlines() if re.match(r"\w+: ", text)]
        self.found[shown] = {"code": code, "seconds": round(time.monotonic() - began, 1), "said": said[-6:]}
        print(f"{shown}: code {code}, {self.found[shown]['seconds']} s", flush=True)
        return code == 0

    def losses(self, way: str) -> list[float]:
        file = self.work / way / "output" / "metrics.jsonl"
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        return [line["lm_loss"] for line in lines if line["kind"] == "train"]


def main() -> int:
    options = _arguments()
    sys.path.insert(0, str(ROOT))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="packed-once-", dir=options.work) as folder:
        return _measure(options, Path(folder), began)


def _measure(options: argparse.Namespace, work: Path, began: float) -> int:
    gpus = gpus_here()
    model = whole_flow.make_model(
        work / "model", whole_flow.of_size(options.size), 0.08 if options.size == "tiny" else 0.02
    )
    whole_flow.make_data(work / "rows.jsonl")
    kind = dict(length=1024, precision="bf16") if gpus else dict(length=256, precision="fp32")
    (work / "conf.yaml").write_text(CONF.format(work=work, base=options.base, **kind))
    bench = Bench(work, options.out, began + options.seconds)
    ended = (
        bench.command("prepare", "prepare", "packed")
        and bench.command("convert, packed", "convert", "packed")
        and bench.command("train, packed once", "train", "packed")
        and bench.command("convert, none", "convert", "none", "model.compare=false")
        and bench.command("train, packed at the start", "train", "none")
        and bench.command("export, onto packed", "export", "packed", "export.merge_onto=packed")
        and bench.command("proof of the export", "proof.export", "packed", "export.merge_onto=packed")
    )
    once, anew = bench.losses("packed"), bench.losses("none")
    apart = [abs(one / other - 1) for one, other in zip(once, anew, strict=False)]
    same = bool(apart) and len(once) == len(anew) and apart[0] == 0 and max(apart) < BOUND
    sizes = {way: sum(file.stat().st_size for file in (work / way / "base").rglob("*")) for way in ("packed", "none")}
    report = {
        "base": options.base,
        "model_bytes": model,
        "base_bytes": sizes,
        "losses": {"packed": once, "none": anew},
        "apart": apart,
        "commands": bench.found,
        "seconds": round(time.monotonic() - began, 1),
    }
    (options.out / "packed-once.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if ended and same else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=whole_flow.SIZES, default="3gb")
    parser.add_argument("--base", choices=("fp8", "int4", "nvfp4", "mxfp4"), default="nvfp4")
    parser.add_argument("--seconds", type=float, default=280, help="after which commands are ended (default 280)")
    parser.add_argument("--work", type=Path, help="folder for all that is made (default a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
