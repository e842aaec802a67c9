"""Pack everything that the GPU tests need, beyond this project and PyTorch, for a machine that reaches nothing.

    python benchmarks/gpu/kit.py [ARCHIVE] [--arch 90]       make gpu-kit; ARCHIVE is .gpu/kit.tar.xz by default

Run it with the Python of an environment that has the project's packages and Transformer Engine with its torch part; no
GPU is needed. The machine is taken to have Python 3.12 and torch with all that torch requires, nothing else.

What to pack is seen, not listed: the trainer's commands run here on a tiny model, once as they are and once with the
real Transformer Engine imported, and every distribution that they import from goes in, at its version here. WITHOUT
names the exceptions; they are hidden from those runs, so a run that succeeds shows that it does without.
Of Transformer Engine's GPU code the archive keeps one architecture's (slim_fatbin.py): 90 is that of H100 and H200.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from slim_fatbin import slim

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ("torch", "numpy")  # and what they require; numpy comes with any torch that anybody uses
# The names under which it looks for itself: none of them is a module that is seen being imported.
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
TRANSFORMER_ENGINE_LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
WITHOUT = {  # top-level modules; MB packed
    "PIL": "for images; 6 MB",
    "accelerate": "used by transformers, where present, to spread a model over devices; 0.3 MB",
    "boto3": "for data sets on S3; 16 MB with botocore",
    "h2": "for HTTP/2 in httpx",
    "pandas": "pyarrow looks for it; 11 MB",
    "sentencepiece": "for tokenizers that the tiny models do not have; 1 MB",
    "tiktoken": "likewise; 1 MB",
    "wget": "fetches such tokenizers",
    "zstandard": "compresses checkpoints, on request; 4 MB",
}
SKIPPED = re.compile(
    r"(^|/)(tests?|__pycache__|__editable__[^/]*)/|\.(pyc|pyi|pxd|pyx|h|hpp|cc|cuh)$|^\.\./|/jax/|_flight\b"
)

# Runs in a process of its own: argv is the file for the answer, then the command. Bridge leaves by os._exit at times.
RECORD = f"""
import atexit, json, runpy, sys
sys.modules.update(dict.fromkeys({list(WITHOUT)}))
answer, module, *sys.argv[1:] = sys.argv[1:]
def write():
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    with open(answer, "w") as f:
        json.dump([file for file in files if file], f)
atexit.register(write)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# What the commands import on a GPU machine: all of the trainer's modules, over the real Transformer Engine.
AS_ON_A_GPU = """
import importlib, pkgutil, sys
import trainer
from trainer.startup import device
device.has_gpu = lambda: True
device.start()
import transformer_engine.pytorch
for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not module.name.startswith("trainer.startup.cpu"):
        importlib.import_module(module.name)
from conf.load import load
from trainer.megatron.model import open_bridge
from trainer.megatron.recipe import make_config
run = load("tiny", sys.argv[1:])
make_config(run, open_bridge(run), None)
"""


def imported(folder: Path, module: str, *arguments: str) -> set[str]:
    """Files of all modules that a command imports."""
    answer, log = folder / "imported.json", folder / f"{module}.log"
    with log.open("w") as f:
        done = subprocess.run(
            [sys.executable, "-c", RECORD, str(answer), module, *arguments],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{folder}"},
            stdout=f,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"python -m {module} {' '.join(arguments)} failed here:\n{log.read_text()[-3000:]}")
    return set(json.loads(answer.read_text()))


def follow(folder: Path) -> set[str]:
    """Files of all modules that the trainer's commands import on a GPU machine, for one model and for both devices."""
    (folder / "as_on_a_gpu.py").write_text(AS_ON_A_GPU)
    paths = [f"paths.{name}={folder / name}" for name in ("model", "base", "data", "output", "export")]
    settings = [*paths, "train.steps=3", "train.validate_every=0", "optimizer.warmup_steps=0"]
    files = imported(folder, "trainer.tiny", "glm4-moe-mtp", str(folder / "model"))
    files |= imported(folder, "trainer.tiny", "data", str(folder / "given"))
    # A process of its own on that machine, where training starts it: its imports would not be seen.
    source = f"data.source={folder / 'given' / 'training.jsonl'}"
    files |= imported(folder, "trainer.prepare", "tiny", *settings, source, "data.processes=1")
    for command in ("trainer.convert", "trainer.train", "trainer.export"):
        files |= imported(folder, command, "tiny", *settings)
    return files | imported(folder, "as_on_a_gpu", *settings)


def distributions(files: set[str]) -> set[str]:
    """Names of the distributions that brought these files."""
    owners = {
        str(found.locate_file(file).resolve()): found.metadata["Name"]
        for found in metadata.distributions()
        for file in found.files or []
        if file.suffix in (".py", ".so")
    }
    return {owners[file] for file in (str(Path(file).resolve()) for file in files) if file in owners}


def required(names: tuple[str, ...]) -> set[str]:
    """The distributions and all that they require here, by normalised name."""
    found, waiting = set(), [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue
        waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def copy(name: str, site: Path) -> None:
    """Copy a distribution's files, those that only serve to build or to test it excepted."""
    distribution = metadata.distribution(name)
    for file in distribution.files or []:
        source = Path(distribution.locate_file(file))
        if SKIPPED.search(file.as_posix()) or not source.is_file():
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Pack what the GPU tests need beyond this project and PyTorch.")
    parser.add_argument("archive", type=Path, nargs="?", default=ROOT / ".gpu/kit.tar.xz")
    parser.add_argument("--arch", type=int, default=90, help="GPU architecture, such as 90 (default) for H100 and H200")
    options = parser.parse_args()
    if options.archive.exists() and not (
        options.archive.is_file() and options.archive.read_bytes()[:6] == b"\xfd7zXZ\0"
    ):
        parser.error(f"{options.archive}: is there, and is no kit; name another file")
    try:
        names = {normal(name) for name in TRANSFORMER_ENGINE if metadata.version(name)}
    except metadata.PackageNotFoundError as error:
        print(f"{error}: set up with make setup EXTRA=gpu, or install it beside the CPU's packages", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        work = Path(folder)
        names |= {normal(name) for name in distributions(follow(work))}
        names -= required(MACHINE)
        site = work / "kit" / "site"
        for name in sorted(names):
            copy(name, site)
        slim(site / TRANSFORMER_ENGINE_LIBRARY, options.arch)
        for library in site.rglob("*.so*"):
            subprocess.run(["strip", "--strip-unneeded", library], check=True)  # symbols: 6 MB packed
        listing = "".join(f"{name}=={metadata.version(name)}\n" for name in sorted(names))
        (work / "kit" / "packages.txt").write_text(listing)
        print(listing, end="")
        options.archive.parent.mkdir(parents=True, exist_ok=True)
        partial = options.archive.with_name(options.archive.name + ".partial")
        tar = ["tar", "-C", str(work / "kit"), "--sort=name", "--owner=0", "--group=0", "-c", "packages.txt", "site"]
        with partial.open("wb") as f, subprocess.Popen(tar, stdout=subprocess.PIPE) as packer:
            subprocess.run(["xz", "-9", "-T0"], stdin=packer.stdout, stdout=f, check=True)
        partial.replace(options.archive)
    print(f"{options.archive}: {len(names)} packages, {options.archive.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
