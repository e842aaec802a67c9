"""Findings of a proof: a line for each weight that differs, and lines of progress."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conf.planner import released_model
from conf.schema.run import Run
from contract.amounts import size
from contract.faults import Fault
from trainer.startup import device
from trainer.startup.console import megatron_to, say
from trainer.weights import released

EVERY = 10.0  # seconds between lines of progress


@dataclass
class Findings:
    name: str  # of the proved folder
    total: int  # bytes
    count: int = 0
    read: int = 0  # bytes
    reported: float = field(default_factory=time.monotonic)

    def add(self, line: str) -> None:
        self.count += 1
        say(f"differs: {line}")

    def moved(self, bytes_read: int) -> None:
        self.read += bytes_read
        if time.monotonic() - self.reported > EVERY:
            self.reported = time.monotonic()
            say(f"verify: {size(self.read)} of {size(self.total)} of {self.name}")

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Context in which a Fault becomes a finding of this weight; the other weights are still checked."""
        try:
            yield
        except Fault as fault:
            self.add(f"{name}: {fault}")


def carry_out(prove: Callable[[Run, Findings], str], run: Run, folder: Path) -> None:
    """Prove this folder, and end with exit code 1 if there are findings."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    device.start()
    findings = Findings(str(folder), sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    with megatron_to(Path(run.paths.logs)):
        proved = prove(run, findings)
    if findings.count:
        say(f"verify: {folder}: {findings.count} findings")
        sys.exit(1)
    say(f"verify: {folder}: {proved}")


def same_bits(a, b) -> bool:
    """Whether two tensors have the same shape, type and bytes, or both are missing."""
    import torch

    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))


def check_release(run: Run) -> None:
    released_model.check_released(Path(run.paths.model))


def census(model: released.Model, base: Path, findings: Findings) -> None:
    """Compare the release, tensor by tensor, with the record in the base's source.json."""
    findings.total += sum(entry.size for entry in model.tensors.values())
    recorded: dict[str, list] = json.loads((base / released.SOURCE).read_text())
    for name in sorted(recorded.keys() - model.tensors.keys()):
        findings.add(f"{name}: the release does not have this tensor any more")
    for name, entry in model.tensors.items():
        dtype, shape, checksum = recorded.get(name, (None, (), ""))
        if dtype is None:
            findings.add(f"{name}: the base was made from a release without this tensor")
        elif (dtype, list(shape)) != (entry.dtype, list(entry.shape)):
            now = f"{entry.dtype} {list(entry.shape)}"
            findings.add(f"{name}: {now} in {entry.file}, but the base was made from {dtype} {list(shape)}")
        elif not released.has_sum(model.folder / entry.file, entry, checksum):
            findings.add(f"{name}: the base was made from other numbers than those in {entry.file}")
        findings.moved(entry.size)
