"""The GPUs of this host by nvidia-smi: all of them, those that a process may use, and the users of their memory."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import os
import re
import subprocess
from pathlib import Path

ANSWERS_WITHIN = 60.0


def listed() -> tuple[str, ...]:
    """Return the UUIDs of this host's GPUs, in nvidia-smi's order."""
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: ([\w-]+)\)", _ask("-L"), re.MULTILINE))


def kind(root: Path = Path("/")) -> str | None:
    """Return the driver's name of this host's GPUs, such as "NVIDIA H200"; None on a host without GPUs."""
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
            if model:
                return model[1].strip()
    names = _ask("--query-gpu=name", "--format=csv,noheader").splitlines()
    return names[0].strip() if names else None


def visible(gpus: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the UUIDs of the listed GPUs that a process with this environment can use."""
    gpus = listed() if gpus is None else gpus
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None or not gpus:
        return gpus
    chosen: list[str] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        if name.isdigit():
            chosen += gpus[int(name) : int(name) + 1]
        elif not name.startswith("-"):  # a UUID, or its beginning; a MIG instance counts as a GPU
            chosen.append(next((gpu for gpu in gpus if gpu.startswith(name)), name))
    return tuple(dict.fromkeys(chosen))


def devices(gpus: tuple[str, ...], host: tuple[str, ...]) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs: numbers, as not every library reads UUIDs; names of MIG instances."""
    return ",".join(str(host.index(gpu)) if gpu in host else gpu for gpu in gpus)


def first() -> str:
    """Name and memory in MiB of the first GPU, such as `NVIDIA H100 80GB HBM3, 81559`; empty without one."""
    return _ask("--query-gpu=name,memory.total", "--format=csv,noheader,nounits").partition("\n")[0]


def used(gpus: tuple[str, ...]) -> int:
    """Return the MiB in use on the fullest of these GPUs."""
    rows = _ask("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    used_by_gpu = dict(re.findall(r"^([\w-]+), *(\d+)", rows, re.MULTILINE))
    return max((int(used_by_gpu[gpu]) for gpu in gpus if gpu in used_by_gpu), default=0)


def users(gpus: tuple[str, ...]) -> str:
    """Return the processes that use these GPUs, as text for people."""
    rows = _ask("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader").splitlines()
    processes = [row.partition(",")[2].strip() for row in rows if row.partition(",")[0].strip() in gpus]
    return "; ".join(f"process {row}" for row in dict.fromkeys(processes)) or "nvidia-smi lists no process"


def answer(*arguments: str) -> tuple[str, str]:
    """Return the output of nvidia-smi, and the reason if it fails. Both are empty on a host without nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN)
    except subprocess.TimeoutExpired:
        return "", "nvidia-smi hangs"
    except OSError:
        return "", ""
    return ("", f"nvidia-smi fails with code {done.returncode}") if done.returncode else (done.stdout, "")


def _ask(*arguments: str) -> str:
    return answer(*arguments)[0]
