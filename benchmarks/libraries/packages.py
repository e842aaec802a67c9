"""Seconds, and findings about an environment: flows/packages.py compared with `uv sync --check`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.libraries.turns import ROOT, medians, show

OURS = """
import sys
sys.path.insert(0, sys.argv[1])
from flows import doctor
from flows.packages import installed
print(doctor.packages(installed(), sys.argv[2]).fact)
"""


def measure(folder: Path) -> None:
    uv = next((path for path in (shutil.which("uv"), ROOT / ".uv/bin/uv") if path and Path(path).is_file()), None)
    uv = os.environ.get("UV") or (str(uv) if uv else None)
    environment = folder / "venv"
    _copy(environment)
    extra = "gpu" if any(environment.glob("lib/*/site-packages/vllm-*.dist-info")) else "cpu"
    calls = {"ours": lambda: _ours(environment, extra)}
    if uv:
        calls |= {
            "uv sync --locked --check": lambda: _uv(uv, environment, extra, "sync", "--locked", "--check"),
            "uv sync --frozen --check": lambda: _uv(uv, environment, extra, "sync", "--frozen", "--check"),
        }
    show(medians(calls, 3))
    for name, damage in DAMAGES.items():
        _copy(environment)
        damage(environment)
        for who, call in calls.items():
            print(f"  {name:22} {who:26} {call()[:110]}", flush=True)
    if not uv:
        print("  no uv on PATH: UV=/folder/uv names one")
    print(f"  {'no uv there':22} {'ours':26} needs none; `make setup` fetches one for the other")


def _copy(environment: Path) -> None:
    """Copy the metadata of this environment's packages into a new one, as both candidates read nothing else."""
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    place = next(environment.glob("lib/*/site-packages"))
    for info in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        (place / info.name).mkdir()
        for name in ("METADATA", "RECORD", "INSTALLER", "WHEEL", "direct_url.json"):
            if (info / name).is_file():
                shutil.copyfile(info / name, place / info.name / name)


def _ours(environment: Path, extra: str) -> str:
    command = [environment / "bin/python", "-c", OURS, ROOT, extra]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _uv(uv: str, environment: Path, extra: str, *command: str) -> str:
    """Run uv only on the copy, with --check, which changes nothing."""
    settings = os.environ | {"UV_PROJECT_ENVIRONMENT": str(environment), "UV_OFFLINE": "1", "NO_COLOR": "1"}
    settings.pop("VIRTUAL_ENV", None)
    line = [uv, *command, "--extra", extra, "--no-progress"]
    done = subprocess.run(line, cwd=ROOT, env=settings, capture_output=True, text=True)
    told = [text for text in done.stderr.splitlines() if text.startswith(("error", " + ", " - ", " ~ ", "Would make"))]
    return f"exit {done.returncode}: {'; '.join(told)}"


def _info(environment: Path, name: str) -> Path:
    return next(environment.glob(f"lib/*/site-packages/{name}-*.dist-info"))


def _removed(environment: Path) -> None:
    shutil.rmtree(_info(environment, "orjson"))


def _other_version(environment: Path) -> None:
    info = _info(environment, "orjson")
    text = (info / "METADATA").read_text().splitlines()
    new = "\n".join("Version: 3.0.0" if line.startswith("Version:") else line for line in text)
    (info / "METADATA").write_text(new)
    info.rename(info.with_name("orjson-3.0.0.dist-info"))


def _one_more(environment: Path) -> None:
    made = next(environment.glob("lib/*/site-packages")) / "stray-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: stray\nVersion: 1.0\n")
    for name in ("RECORD", "WHEEL"):
        (made / name).write_text("")


DAMAGES = {
    "as in uv.lock": lambda environment: None,
    "a package removed": _removed,
    "another version": _other_version,
    "a package more": _one_more,
}
