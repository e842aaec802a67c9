"""GPUs with the figures of their data sheets, and a user's GPU from a small YAML file.

    of(run)                               the GPU of hardware.gpu and hardware.price; those keys explain null
    read("h200"), read("my-gpu.yaml")
    by_device("NVIDIA H200")              the GPU that a driver calls by this name

conf/tables/gpus.yaml has the known GPUs.

cpu means this host: its memory is shared by all processes that the layout starts on it. Its rates are a guess, which
ranks layouts of tiny models. The time of a step is predicted from a matrix product that is measured on this host.

    # my-gpu.yaml
    name: l40s
    memory: 44.4      # GiB that torch reports in total; less than the advertised memory
    bf16: 362         # TFLOPS, dense; the sparse figure of data sheets is twice as high
    fp8: 733          # optional, like fp32
    hbm: 864          # GB/s
    link: 32          # GB/s per GPU and direction to the other GPUs of the host
    network: 25       # GB/s per GPU and direction to other hosts
    per_host: 8
    price: 1.2        # USD per GPU and hour; optional
    capability: 8.9   # CUDA's compute capability, which decides on FP8 recipes; default: 9.0 with fp8
    bus: 25           # GB/s per GPU and direction to the host's memory; default: 55 (PCIe 5)
    host: 51          # GB/s of the host's memory, the share of one GPU; default: 75
    domain: 72        # GPUs that NVLink joins, if more than those of a host

Not covered: power limits and clocks of one machine, hosts whose GPUs differ, topologies of the network.
"""

import os
import re
import time
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from conf import strict_yaml
from conf.error_lines import line
from conf.rules.precision import CAPABLE, beyond_a_cpu
from conf.schema.run import Run
from conf.schema.sections import Degree, Strict
from contract.faults import ConfigError

GIB = 2**30
GB = 10**9

# Shares of the data sheet's bandwidth between GPUs that training achieves. conf/planner/rates.py has those of one GPU.
LINK = 0.8  # NVLink: NCCL's bus bandwidth for 100 MB and more
NETWORK = 0.8  # InfiniBand or RoCE with all hosts busy at once
ALL_TO_ALL = 0.6  # many small messages, and all ranks wait for the largest


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes that torch can use
    tflops: dict[str, float]  # by precision, dense
    hbm: float  # bytes/s
    link: float  # bytes/s per GPU and direction, within `domain`
    network: float  # bytes/s per GPU and direction, beyond it
    per_host: int
    price: float | None = None  # USD per GPU and hour
    domain: int = 0  # GPUs that NVLink joins; 0 = those of a host
    cuda: bool = True  # False = a CPU
    capability: float = 9.0  # CUDA's compute capability
    bus: float = 55 * GB  # bytes/s per GPU and direction to the host's memory: of 64 over PCIe 5
    host: float = 75 * GB  # bytes/s of the host's memory, a GPU's share: 16 channels of DDR5-4800 for 8 in a DGX H100

    def flops(self, precision: str) -> float:
        """FLOP/s of products in fp32, bf16, fp16 or fp8; GPUs are as fast in fp16 as in bf16."""
        return self.tflops["bf16" if precision == "fp16" else precision] * 1e12

    @property
    def joined(self) -> int:
        return self.domain or self.per_host

    @property
    def transposes(self) -> bool:
        """Whether FP8 products accept only one layout of their operands, so that weights are kept in both layouts."""
        return self.capability < 10 or 12 <= self.capability < 13


CPU = Gpu("cpu", 0, {"fp32": 0.1, "bf16": 0.1}, 20 * GB, 5 * GB, 1 * GB, 1, cuda=False, capability=0)
PRODUCTS = 0.3  # seconds in which this CPU is measured
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container

Figure = Annotated[float, Field(gt=0, le=10**6)]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("unprintable", "contains unprintable characters")
    return value


class OwnGpu(Strict):
    """A user's own GPU, as its file describes it. The docstring of this module has the units."""

    name: Annotated[str, Field(min_length=1), AfterValidator(_printable)]
    memory: Figure
    bf16: Figure
    hbm: Figure
    link: Figure
    network: Figure
    per_host: Degree
    fp8: Figure | None = None
    fp32: Figure | None = None
    price: Annotated[float, Field(ge=0, le=10**6)] | None = None
    capability: Figure | None = None
    bus: Figure = 55
    host: Figure = 75
    domain: Annotated[int, Field(ge=0, le=10**6)] = 0

    def gpu(self) -> Gpu:
        fp32 = self.fp32 or self.bf16 / 16  # the ratio on A100 and H100
        tflops = {"fp32": fp32, "bf16": self.bf16} | ({"fp8": self.fp8} if self.fp8 else {})
        figures = self.model_dump(exclude={"fp32", "bf16", "fp8"})
        figures |= {key: figures[key] * GB for key in ("hbm", "link", "network", "bus", "host")}
        figures |= {"memory": int(self.memory * GIB), "capability": self.capability or (9.0 if self.fp8 else 8.0)}
        return Gpu(tflops=tflops, **figures)


GPUS = {kind["name"]: OwnGpu.model_validate(kind).gpu() for kind in strict_yaml.table("gpus")}
NAMES = (*GPUS, CPU.name)


@cache
def cpu_flops() -> float:
    """Return the FLOP/s of this host's CPU in products of fp32 matrices, from the fastest product of one thread.

    The fastest one is least disturbed by other programs. Two threads count as one core.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    size, best, until = 256, 0.0, time.perf_counter() + PRODUCTS
    matrix = np.ones((size, size), np.float32)
    with threadpool_limits(1):
        while time.perf_counter() < until or not best:
            began = time.perf_counter()
            np.matmul(matrix, matrix)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best * max(1.0, len(os.sched_getaffinity(0)) / 2)


def of(run: Run, gpus: int | None = None) -> Gpu:
    """Return the GPU that the run is planned for. `gpus` is the total number, if it differs from the layout's."""
    named = next((word for word in run.name.split("-") if word in NAMES), None)
    usual = CPU.name if str(run.model.source).startswith("tiny://") else "h100"
    gpu = priced(read(run.hardware.gpu or named or usual, "hardware.gpu"), run.hardware.price)
    if gpu.cuda:
        return gpu
    here = gpus or run.layout.gpus_per_node
    return replace(gpu, memory=gpu.memory // here, per_host=here)


def read(name: str, place: str = "gpu") -> Gpu:
    """Return a GPU: one of GPUS by its name, this host's CPU, or a user's GPU from a YAML file."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if name.lower() == CPU.name:
        return replace(CPU, memory=_host_memory())
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(f"{place}: {name!r} is not one of {', '.join(NAMES)}, and not a .yaml file")
    keys, wrong = strict_yaml.parse(strict_yaml.read_text(Path(name), name), name)
    if wrong:
        raise ConfigError(*wrong)
    if not isinstance(keys, dict):
        raise ConfigError(f"{name}: takes the keys {', '.join(OwnGpu.model_fields)}")
    try:
        return OwnGpu.model_validate(keys).gpu()
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError(*(f"{name}: {line(detail, _meant)}" for detail in details)) from None


def by_device(name: str) -> Gpu | None:
    """Return the GPU that a driver calls by this name, if it is known."""

    def meant(kind: str) -> bool:  # also RTX 4090; but a GB200 is not a B200, and an L40 is not an L4
        spaced = re.sub(r"(?<=[a-z])(?=\d)", " ?", kind)
        return bool(re.search(rf"(?<![a-z]){spaced}(?![\ds])", name.lower()))

    return next((gpu for kind, gpu in GPUS.items() if meant(kind)), None)


def peak(device: str) -> float | None:
    """Return dense TFLOP/s in bf16 of the GPU that a driver calls by this name; None if it is unknown."""
    gpu = by_device(device)
    return gpu.tflops["bf16"] if gpu else None


def _meant(key: str) -> str:
    near = get_close_matches(key, OwnGpu.model_fields, n=1)
    return f"; did you mean {near[0]}?" if near else f"; the keys here are {', '.join(OwnGpu.model_fields)}"


def _host_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of this container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in LIMITS:
        text = file.read_text().strip() if file.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def priced(gpu: Gpu, price: float | None) -> Gpu:
    """Return the GPU with this price, if a price is set."""
    if price is None:
        return gpu
    if not isfinite(price) or price < 0:
        raise ConfigError(f"price: {price} is not a price in USD per GPU and hour; it must be at least 0")
    return replace(gpu, price=price)


def unsupported(run: Run, gpu: Gpu) -> list[str]:
    """Return lines for settings of the run that this GPU does not support."""
    lines, fp8 = [], run.train.fp8
    recipes = [name for name, (least, below) in CAPABLE.items() if least <= gpu.capability < below]
    if fp8 and gpu.cuda and "fp8" not in gpu.tflops:
        lines.append(f"train.fp8: {fp8}, but {gpu.name} has no FP8; null")
    elif fp8 and gpu.cuda and fp8 not in recipes:
        lines.append(f"train.fp8: {fp8} is not supported by {gpu.name}; it supports {', '.join(recipes) or 'null'}")
    if not gpu.cuda:
        lines += [f"{key}: {value} needs a GPU; on a CPU {usual}" for key, value, usual in beyond_a_cpu(run)]
    return lines
