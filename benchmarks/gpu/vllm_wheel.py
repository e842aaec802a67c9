"""vLLM's CUDA build of uv.lock, fetched and made small: what one kind of GPU does not run is left out.

The wheel of 0.26.0 has 304 MB, and packs to 44 for sm_90. Left out are FlashAttention 2, as GPUs from sm_90 on get 3,
the router that is a program of its own, and CUTLASS's headers: with them DeepGEMM would compile kernels for weights
that are stored as blocks of FP8, and kernels for sm_100 be compiled; the rest of vLLM does without.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from slim_fatbin import MAGIC, slim

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = re.compile(
    r"/_vllm_fa2_C\.|^vllm/vllm-rs$|/fmha_sm100/cutlass/|/deep_gemm/include/|(^|/)tests?/|\.cpython-3(?!12-)\d+-"
)


def locked() -> tuple[str, str, list[str]]:
    """The version of the CUDA build in uv.lock, what of its wheel's name says where it runs, and its digests."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (found,) = (each for each in packages if each["name"] == "vllm" and "registry" in each["source"])
    wheels = {each["url"].rsplit("/", 1)[-1]: each["hash"] for each in found["wheels"]}
    (name,) = (name for name in wheels if name.endswith("x86_64.whl"))
    return found["version"], name.rsplit("-", 1)[-1].removesuffix(".whl"), [*wheels.values()]


def pip() -> list[str]:
    """A pip: of the environment that setup.sh makes for uv, of this one, or of the system."""
    for python in (str(ROOT / ".uv/bin/python"), sys.executable, "python3"):
        command = [python, "-m", "pip"]
        if shutil.which(python) and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    raise FileNotFoundError("no pip here to fetch vLLM's wheel with: fetch it elsewhere, and name it by --vllm")


def fetch(folder: Path) -> Path:
    """Download the wheel that uv.lock names, held to the digest there."""
    version, platform, digests = locked()
    asked = folder / "vllm.txt"
    asked.write_text(f"vllm=={version} {' '.join(f'--hash={digest}' for digest in digests)}\n")
    where = ["--python-version=3.12", "--implementation=cp", *(f"--platform={each}" for each in platform.split("."))]
    command = [*pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:", *where, "--dest", str(folder)]
    subprocess.run([*command, "--requirement", str(asked)], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def unpack(wheel: Path, site: Path) -> None:
    """Unpack what is not left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not LEFT_OUT.search(name):
                archive.extract(name, site)


def shrink(site: Path, arch: int) -> None:
    """Blank the GPU code of other architectures in each library that has some."""
    for library in site.rglob("*.so"):
        if MAGIC in library.read_bytes():
            slim(library, arch, needed=False)
