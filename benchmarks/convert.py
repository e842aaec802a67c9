"""Speed and memory of conversion and export, compared with `cp -r` and `sync` of the same bytes, and Megatron-Bridge.

    python -m benchmarks.convert [--size-gb 12] [--processes 2]      make bench-convert SIZE_GB=12
    python -m benchmarks.convert --size-gb 2 --no-bridge             a short run, or if memory is short

The benchmark generates a model with the widths of Qwen3-30B-A3B and enough layers for the size. Every command runs
twice: with its input files dropped from the page cache (cold), and with cached files (warm). All of that is repeated at
half the size. The export reads every tensor of the unchanged base and writes it again. The merge has an adapter of rank
8 on every linear layer and every expert. "described" is convert.to: none, which reads the release once and writes no
weights. On a virtual machine the cost of a memory page changes severalfold within minutes. So each row is compared with
a copy just before it and a copy just after it. The output of a row is removed before the second copy, because pages
that were freed long ago cost most. A row has the time of the complete command, except for the start of its processes,
which is shown separately. Memory is the largest resident set of a process, and the part of it that belongs to no file,
sampled ten times a second. CPU seconds are those of all processes; on a busy host they are more reliable than the other
figures. The comparison of the first layers at the end of a conversion has the same size for all models.
Megatron-Bridge's tools (benchmarks/bridge_tools.py) run in one process, with their start included. They hold the
complete model, so they are skipped if the host has too little memory.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workspace import workspace
from contract import checkpoints
from contract.output_marks import PARTIAL
from trainer.weights import atomic_folder

ROOT = Path(__file__).parents[1]
GB = 10**9
SHARD = 4 * GB  # of a release
WIDTHS = "qwen3-30b-a3b"
RANK = 8  # of the adapter
ROWS = ["described", "convert", "convert, compared", "export", "merge"]


@dataclass(frozen=True)
class BridgeTool:
    name: str
    makes: str
    reads: tuple[str, ...]
    takes: float  # times the model, of memory: measured with 4.3 and 12.5 GB

    def left_out(self, work: Path, size: float) -> str | None:
        """Return the reason why this host cannot run the command."""
        if missing := [name for name in self.reads if not (work / name).exists()]:
            return f"left out: there is no {missing[0]}"
        if psutil.virtual_memory().available < self.takes * size * GB:
            return f"left out: it takes some {self.takes * size:.0f} GB of memory"
        return None

    def command(self, work: Path) -> list[str]:
        paths = [str(work / name) for name in (*self.reads, self.makes)]
        return [sys.executable, "-m", "benchmarks.bridge_tools", self.name, *paths]


BRIDGE_TOOLS = (
    BridgeTool("import", "bridge", ("model",), 1.6),
    BridgeTool("export", "bridge-export", ("model", "bridge"), 1.7),
    BridgeTool("merge", "bridge-merge", ("model", "bridge/iter_0000000", "output/checkpoints/iter_0000001"), 2.0),
)


class Killed(Exception):
    """The kernel has killed a command that needed more memory than the host has."""


@dataclass(frozen=True)
class Took:
    seconds: float
    resident: float  # GB, of the largest process
    anonymous: float  # GB of it that belong to no file
    cpu: float  # seconds
    start: float = 0.0  # seconds, of those above


def generate(folder: Path, size: float) -> float:
    """Write a release of about this many GB. Return its exact size."""
    import torch

    from conf import model_facts
    from trainer.rehearsal import tiny_models

    config: dict[str, Any] = json.loads((ROOT / f"conf/models/{WIDTHS}.json").read_text())["config"]
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"}
    shapes: dict[str, tuple[int, ...]] = {}
    for layers in range(1, config["num_hidden_layers"] + 1):
        config["num_hidden_layers"] = layers
        shapes = model_facts.shapes(config)
        if sum(torch.Size(shape).numel() * 2 for shape in shapes.values()) > (size - 0.6) * GB:
            break
    folder.mkdir()
    tiny_models.make_tokenizer(folder, 512)
    tiny_models.write_json(folder / "config.json", config)
    noise = (0.02 * torch.randn(2**24 + 1, generator=torch.Generator().manual_seed(0))).bfloat16()
    files, held = [{}], 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel() * 2
        if held and held + count > SHARD:
            files.append({})
            held = 0
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [held, held + count]}
        held += count
    weight_map = {}
    for number, header in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(header, file)
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for seed, row in enumerate(header.values()):
                left = (row["data_offsets"][1] - row["data_offsets"][0]) // 2
                while left:  # no two tensors begin alike
                    some = noise[seed % 1000 : seed % 1000 + min(left, 2**24 - 1000)]
                    f.write(some.view(torch.uint8).numpy().data)
                    left -= len(some)
    index = {"metadata": {}, "weight_map": weight_map}
    tiny_models.write_json(folder / "model.safetensors.index.json", index)
    return sum(path.stat().st_size for path in folder.iterdir()) / GB


def train(model: Path, folder: Path) -> None:
    """Write a checkpoint of an adapter as a training would, except for the digests of its tensors."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    config = json.loads((model / "config.json").read_text())
    layers, experts, wide = (config[key] for key in ("num_hidden_layers", "num_experts", "hidden_size"))
    heads, groups, narrow = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size")
    )
    width = config["head_dim"]
    shapes = {  # out and in, of Megatron's layers
        "self_attention.linear_qkv": ((heads + 2 * groups) * width, wide),
        "self_attention.linear_proj": (wide, heads * width),
        "mlp.experts.experts.linear_fc1": (2 * narrow, wide),
        "mlp.experts.experts.linear_fc2": (wide, narrow),
    }
    stored = {}
    for name, (rows, columns) in shapes.items():
        before = (layers, experts) if ".experts." in name else (layers,)
        stored[f"decoder.layers.{name}.adapter.linear_in.weight"] = torch.full((*before, RANK, columns), 1e-3)
        stored[f"decoder.layers.{name}.adapter.linear_out.weight"] = torch.full((*before, rows, RANK), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        save(stored, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")  # this and the next are what megatron-core knows its checkpoints by
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "run_config.yaml").write_text(f"peft: {{dim: {RANK}, alpha: {2 * RANK}}}\n")
    checkpoints.mark(folder)


def timed(command: list[str], log: Path, begun: Path | None = None) -> Took:
    """Run the command. The file `begun` appears when its work begins."""
    start, resident, anonymous, before = time.monotonic(), 0, 0, os.times()
    started = 0.0
    with log.open("a") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        while process.poll() is None:
            for one in _family(process.pid):
                resident, anonymous = max(resident, one[0]), max(anonymous, one[1])
            if begun and not started and begun.exists():
                started = time.monotonic() - start
            time.sleep(0.1)
    if process.returncode == -signal.SIGKILL:
        raise Killed(f"killed with {resident / GB:.1f} GB, as memory ran out")
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()[-3000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Took(time.monotonic() - start, resident / GB, anonymous / GB, cpu, started)


def _family(pid: int) -> list[tuple[int, int]]:
    found = []
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            sizes = {
                line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "RssA"))
            }
            found.append((sizes.get("VmRSS", 0), sizes.get("RssAnon", 0)))
    except (psutil.Error, OSError):
        pass
    return found


def copied(source: Path, target: Path, log: Path) -> Took:
    took = timed(["sh", "-c", f"cp -r {source} {target} && sync"], log)
    shutil.rmtree(target)
    return took


def drop(folder: Path) -> None:
    """Drop the content of the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(work: Path, size: float, processes: int, bridge: bool, rows: list[str]) -> None:
    model, base, log = work / "model", work / "base", work / "log"
    size = generate(model, size)
    train(model, work / "output/checkpoints/iter_0000001")
    print(f"\n{size:.1f} GB of {WIDTHS}'s widths, {processes} processes, {os.cpu_count()} CPUs\n")
    print(f"{'':26} {'seconds':>8} {'start':>6} {'CPU s':>8} {'GB RSS':>7} {'of no file':>10}")
    paths = [f"paths.{name}={work / name}" for name in ("model", "base", "output", "export", "logs")]
    ours = [*paths, f"layout.gpus_per_node={processes}", "train.precision=bf16", "train.global_batch=64"]

    def command(name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", f"trainer.{name}", "tiny", *ours, *more]

    def show(what: str, took: Took) -> Took:
        numbers = f"{took.seconds - took.start:8.1f} {took.start:6.1f} {took.cpu:8.1f}"
        print(f"{what:26} {numbers} {took.resident:7.2f} {took.anonymous:10.2f}", flush=True)
        return took

    for state in ("cold", "warm"):

        def ready(folder: Path, state=state) -> Path:
            if state == "cold":
                drop(folder)
            return folder

        def copy(state=state) -> float:
            return show(f"cp -r, sync ({state})", copied(ready(model), work / "copy", log)).seconds

        os.sync()
        asked = [
            ("described", base, command("convert", "convert.to=none", "model.compare=false")),
            ("convert", base, command("convert", "model.compare=false")),
            ("convert, compared", base, command("convert")),
            ("export", work / "export", command("export", "export.checkpoint=base")),
            ("merge", work / "export", command("export", "export.formats=[merged]")),
        ]
        asked = [row for row in asked if row[0] in rows]
        shutil.rmtree(asked[0][1], ignore_errors=True)
        copies, took = [copy()], dict[str, Took]()
        for (what, made, line), (_, next_made, _) in zip(asked, [*asked[1:], asked[-1]], strict=True):
            for read in (model, *([base] if made != base else [])):
                ready(read)
            begun = made.with_name(made.name + PARTIAL) / atomic_folder.JOURNAL
            took[what] = show(f"{what} ({state})", timed(line, log, begun))
            shutil.rmtree(next_made, ignore_errors=True)
            copies.append(copy())
        if bridge:
            for tool in BRIDGE_TOOLS:
                named = f"Bridge's {tool.name} ({state})"
                if reason := tool.left_out(work, size):
                    print(f"{named:26} {reason}", flush=True)
                    continue
                for name in tool.reads:
                    ready(work / name)
                try:
                    took[f"Bridge's {tool.name}"] = show(named, timed(tool.command(work), log))
                    copies.append(copy())
                except Killed as killed:
                    print(f"{named:26} {killed}", flush=True)
                    shutil.rmtree(work / tool.makes, ignore_errors=True)
            for tool in BRIDGE_TOOLS:
                shutil.rmtree(work / tool.makes, ignore_errors=True)
        times = [
            f"{what} {(one.seconds - one.start) / ((before + after) / 2):.2f}"
            for (what, one), (before, after) in zip(took.items(), itertools.pairwise(copies), strict=True)
        ]
        print(f"times the mean of the copies around each: {'; '.join(times)}\n", flush=True)
    for folder in (model, base, work / "output"):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-bridge", action="store_true", help="leave Megatron-Bridge's own tools out")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=ROWS,
        help="exports want a base before them",
    )
    parser.add_argument("--folder", help="on the disk that is measured; by default that of temporary files")
    options = parser.parse_args()
    with workspace("convert", options.folder) as work:
        for size in (options.size_gb, options.size_gb / 2):
            measure(work, size, options.processes, not options.no_bridge, options.rows)


if __name__ == "__main__":
    main()
