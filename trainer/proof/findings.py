"""Findings of a proof: a line for each weight that is not as it should be, and how far it has come."""

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
    what: str
    total: int  # bytes
    count: int = 0
    done: int = 0
    said: float = field(default_factory=time.monotonic)

    def add(self, line: str) -> None:
        self.count += 1
        say(f"differs: {line}")

    def moved(self, bytes_read: int) -> None:
        self.done += bytes_read
        if time.monotonic() - self.said > EVERY:
            self.said = time.monotonic()
            say(f"verify: {size(self.done)} of {size(self.total)} of {self.what}")

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A fault of one weight is a finding; the others are looked at all the same."""
        try:
            yield
        except Fault as fault:
            self.add(f"{name}: {fault}")


def carry_out(prove: Callable[[Run, Findings], str], run: Run, folder: Path) -> None:
    """Look for findings in this folder, and end with exit code 1 where there are any."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    device.start()
    found = Findings(str(folder), sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    with megatron_to(Path(run.paths.logs)):
        proved = prove(run, found)
    if found.count:
        say(f"verify: {folder}: {found.count} findings")
        sys.exit(1)
    say(f"verify: {folder}: {proved}")


def check_release(run: Run) -> None:
    released_model.check_released(Path(run.paths.model))


def census(model: released.Model, recorded: dict[str, list], found: Findings) -> None:
    """Compare the release with what a base's source.json says of it, tensor by tensor."""
    for name in sorted(recorded.keys() - model.tensors.keys()):
        found.add(f"{name}: the release has no such tensor any more")
    for name, entry in model.tensors.items():
        dtype, shape, checksum = recorded.get(name, (None, (), ""))
        if dtype is None:
            found.add(f"{name}: the base was made from a release without this tensor")
        elif (dtype, list(shape)) != (entry.dtype, list(entry.shape)):
            now = f"{entry.dtype} {list(entry.shape)}"
            found.add(f"{name}: {now} in {entry.file}, and the base was made from {dtype} {list(shape)}")
        elif not released.has_sum(model.folder / entry.file, entry, checksum):
            found.add(f"{name}: has other numbers in {entry.file} than the base was made from")
        found.moved(entry.size)
