"""The GPUs of this host, as nvidia-smi tells: which there are, which a process may use, and who uses their memory."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import os
import re
import subprocess
from pathlib import Path

ANSWERS_WITHIN = 60.0


def listed() -> tuple[str, ...]:
    """UUIDs of this host's GPUs, in nvidia-smi's order."""
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: ([\w-]+)\)", _ask("-L"), re.MULTILINE))


def kind(root: Path = Path("/")) -> str | None:
    """The driver's name of this host's GPUs, such as "NVIDIA H200"; None on a host without any."""
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
            if model:
                return model[1].strip()
    names = _ask("--query-gpu=name", "--format=csv,noheader").splitlines()
    return names[0].strip() if names else None


def visible(gpus: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """UUIDs of the GPUs that a process with this environment can use, of those that are listed."""
    gpus = listed() if gpus is None else gpus
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not gpus:
        return gpus
    found: list[str] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if name.isdigit():
            found += gpus[int(name) : int(name) + 1]
        elif not name.startswith("-"):  # a UUID, or how it begins; a MIG instance counts as a GPU
            found.append(next((gpu for gpu in gpus if gpu.startswith(name)), name))
    return tuple(dict.fromkeys(found))


def devices(gpus: tuple[str, ...], there: tuple[str, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs: by number, as not every library reads UUIDs; MIG instances by name."""
    return ",".join(str(there.index(gpu)) if gpu in there else gpu for gpu in gpus)


def first() -> str:
    """Name and memory in MiB of the first GPU, such as `NVIDIA H100 80GB HBM3, 81559`; empty without one."""
    return _ask("--query-gpu=name,memory.total", "--format=csv,noheader,nounits").partition("\n")[0]


def used(gpus: tuple[str, ...]) -> int:
    """MiB in use on the fullest of these GPUs."""
    rows = _ask("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    found = dict(re.findall(r"^([\w-]+), *(\d+)", rows, re.MULTILINE))
    return max((int(found[gpu]) for gpu in gpus if gpu in found), default=0)


def users(gpus: tuple[str, ...]) -> str:
    """Processes that use these GPUs, as text for people."""
    rows = _ask("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader").splitlines()
    found = [row.partition(",")[2].strip() for row in rows if row.partition(",")[0].strip() in gpus]
    return "; ".join(f"process {row}" for row in dict.fromkeys(found)) or "nvidia-smi does not say whom"


def _ask(*arguments: str) -> str:
    """The output of nvidia-smi; nothing on a host without GPUs."""
    try:
        answer = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
