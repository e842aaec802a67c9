"""Read a rank's trace in the format of torch's profiler (Chrome's) into works, calls and operations.

Only kernels, copies and fills count as work of a device. The profiler also repeats annotations on the device's side,
which would count each collective twice. Everything is clipped to the profiled steps; times are microseconds of the
host's clock, which all ranks of a host share.
"""

import gzip
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contract.faults import Fault

STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OF_HOST = ("cpu_op", "user_annotation")

# Kinds of kernels, collectives, copies and fills, by their names.
_KINDS = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text())
COLLECTIVES, COPIES = {*_KINDS["collectives"]}, {*_KINDS["copies"]}
OTHER = "other"
_NAMES = [(name, re.compile(text, re.IGNORECASE)) for group in _KINDS.values() for name, text in group.items()]

# Calls in which the host waits until the device has finished.
WAITS = re.compile(r"^cuda(Device|Stream|Event)Synchronize|^cu(Ctx|Stream|Event)Synchronize|^cudaMemcpy$|^cudaFree")
STARTS = re.compile(r"Launch|Memcpy|Memset")  # calls that give the device work

WIDTHS = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}
WIDTHS |= {"Float8_e4m3fn": 1, "Float8_e5m2": 1}


class Work(NamedTuple):
    """Work of a device: a kernel, a copy or a fill."""

    start: float
    end: float
    name: str
    kind: str  # in kinds.yaml
    correlation: int  # of the call that started it
    group: str  # name of a collective's group
    ranks: str
    size: int  # bytes that a collective or a copy has moved


class Call(NamedTuple):
    """A call of the driver by a thread of the host, or an operation of that thread."""

    start: float
    end: float
    name: str
    thread: str
    correlation: int


@dataclass(frozen=True)
class Trace:
    rank: int
    steps: int
    start: float
    end: float
    work: list[Work]  # by start
    calls: list[Call]
    operations: list[Call]  # of torch, by start; outer operations before those inside them

    @property
    def span(self) -> float:
        return self.end - self.start

    @property
    def collectives(self) -> list[Work]:
        return [work for work in self.work if work.kind in COLLECTIVES]

    @cached_property
    def waits(self) -> list[Call]:
        """The calls in which the host waits for the device, by end."""
        return sorted((call for call in self.calls if WAITS.search(call.name)), key=lambda call: call.end)

    @cached_property
    def starts(self) -> dict[int, Call]:
        """The calls that give the device work, by correlation."""
        return {call.correlation: call for call in self.calls if STARTS.search(call.name)}


def kind_of(name: str) -> str:
    """Kind of a kernel, a copy or a fill."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)


def read(path: Path) -> Trace:
    """Trace of the steps that are marked in a file; of the whole file if no step is marked."""
    try:
        with gzip.open(path, "rt") as file:
            return of(json.load(file))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise Fault(f"{path}: not a trace of torch's profiler: {type(error).__name__}: {error}") from error


def of(whole: dict[str, Any]) -> Trace:
    events = [event for event in whole["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)]
    bounds = steps or events
    if not bounds:
        raise ValueError("nothing was recorded")
    start = min(event["ts"] for event in bounds)
    end = max(event["ts"] + event["dur"] for event in bounds)
    inside = [event for event in events if event["ts"] < end and event["ts"] + event["dur"] > start]
    return Trace(
        rank=int(whole.get("distributedInfo", {}).get("rank", 0)),
        steps=max(1, len(steps)),
        start=start,
        end=end,
        work=sorted(_work(event, start, end) for event in inside if event.get("cat") in ON_DEVICE),
        calls=sorted(_call(event) for event in inside if event.get("cat") in CALLS),
        operations=sorted(
            (_call(event) for event in inside if event.get("cat") in OF_HOST and event not in steps),
            key=lambda operation: (operation.start, -operation.end),
        ),
    )


def _work(event: dict[str, Any], start: float, end: float) -> Work:
    facts = event.get("args", {})
    kind = kind_of(event["name"])
    group = ""
    if kind in COLLECTIVES:
        group = str(facts.get("Process Group Description") or facts.get("Process Group Name") or "unknown")
    size = facts.get("bytes", 0)
    if "In msg nelems" in facts:
        elements = max(int(facts["In msg nelems"]), int(facts.get("Out msg nelems", 0)))
        size = elements * WIDTHS.get(str(facts.get("dtype")), 4)
    return Work(
        max(start, event["ts"]),
        min(end, event["ts"] + event["dur"]),
        event["name"],
        kind,
        int(facts.get("correlation", -1)),
        group,
        str(facts.get("Process Group Ranks", "")),
        int(size),
    )


def _call(event: dict[str, Any]) -> Call:
    facts = event.get("args", {})
    thread = f"{event.get('pid')}/{event.get('tid')}"
    return Call(event["ts"], event["ts"] + event["dur"], event["name"], thread, int(facts.get("correlation", -1)))
