"""Measurement of a study's layout by python -m trainer.trial, kept in the study's folder.

    kept(folder, row, how)        earlier measurement of this configuration, by the same code on the same device
    measure(folder, row, how)     measures the layout; a failure is also an answer, and the next call tries again

<folder>/rows/LIST-ROW.json has the answer, <folder>/logs/ the trial's output, <folder>/profiles/ the traces.
"""

# pyright: reportArgumentType=false

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.study.rows import Row
from conf.host import nvidia_smi
from contract import checksums, json_object
from contract.faults import Fault, Stopped
from contract.files import write_atomically
from flows import packages
from tasks.run import launch

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine")
CODE = ("contract", "conf", "trainer")


@dataclass(frozen=True)
class How:
    """Options for every layout."""

    steps: int
    layers: int | None = None  # keep only this number of layers
    profile: bool = False
    within: float = 600.0  # seconds that a trial may take


@cache
def versions() -> dict[str, str]:
    """Return the versions that affect a measurement: packages, the trainer's code, and the device."""
    code, have = checksums.of_code(launch.ROOT, CODE), packages.installed()
    found = {name: have.get(name, "none") for name in PACKAGES}
    return found | {"the trainer's code": code, "device": nvidia_smi.kind() or "cpu"}


def of_row(row: Row) -> str:
    """Return the digest of the measured configuration. New keys with default values do not change the digest."""
    run = row.run().model_dump(mode="json", exclude={"paths"}, exclude_defaults=True)
    return checksums.of_json(run)


def kept(folder: Path, row: Row, how: How | None = None) -> dict[str, Any] | None:
    """Return the stored result with its versions. Without `how`, any result of this configuration counts."""
    file = _file(folder, row)
    try:
        found = json_object.read(file) if file.is_file() else {}
    except Fault:  # an incomplete file, such as on a full disk; the row is measured again
        return None
    if found.get("configuration") != of_row(row):
        return None
    if how and (found["versions"], found["steps"], found["layers"]) != (versions(), how.steps, how.layers):
        return None
    if how and how.profile and not found["answer"].get("profile"):
        return None
    return found["answer"] | {"versions": found["versions"]}


def measure(folder: Path, row: Row, how: How) -> dict[str, Any]:
    """Measure a layout. Return the trial's answer, or {"failed": reason}."""
    name = slug(row)
    log, traces = folder / "logs" / f"{name}.log", folder / "profiles" / name
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    shutil.rmtree(traces, ignore_errors=True)  # the traces are recorded again
    said: list[str] = []
    failed, ends = None, time.monotonic() + how.within
    try:
        launch.process(list(command(row, how, traces)), log, said.append, stop=lambda: time.monotonic() > ends)
    except Stopped:
        failed = f"took more than {how.within:.0f} s"
    except Fault as fault:
        failed = " ".join(str(fault).split())
    except launch.Broken as broken:
        failed = f"{str(broken).splitlines()[-1].strip()}; {log} has the rest"
    if (answer := _answer(said)) is None:
        return {"failed": failed or f"no answer; {log} has its output"}
    record = {"configuration": of_row(row), "steps": how.steps, "layers": how.layers, "versions": versions()}
    file = _file(folder, row)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(record | {"answer": answer}), durable=False)
    return answer | {"versions": versions()}


def command(row: Row, how: How, traces: Path) -> Iterator[str]:
    yield from ("trainer.trial", row.configuration, "--steps", str(how.steps), "--json")
    yield from ("--layers", str(how.layers)) if how.layers else ()
    yield from ("--profile-to", str(traces)) if how.profile else ()
    yield from row.overrides


def slug(row: Row) -> str:
    """Name of a row's files."""
    return re.sub(r"[^\w.+-]+", "-", f"{row.of}-{row.name}").strip("-")


def _file(folder: Path, row: Row) -> Path:
    return folder / "rows" / f"{slug(row)}.json"


def _answer(said: list[str]) -> dict[str, Any] | None:
    """Return the JSON in the trial's last line. A long line arrives in several pieces."""
    for place in range(len(said) - 1, -1, -1):
        if said[place].startswith('{"name"'):
            try:
                return json.JSONDecoder().raw_decode("".join(said[place:]))[0]
            except ValueError:
                return None
    return None
