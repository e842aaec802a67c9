"""GPUs of a new configuration: the named ones, those of this host, or the fewest that hold the model.

parse("8xh100")          also h100, 4, 2x8xh200 (hosts x GPUs), 1xmy-gpu.yaml, cpu
of_this_host()           GPUs that nvidia-smi lists and this process may use; None without a GPU
"""

import re
from dataclasses import dataclass

from conf.host import nvidia_smi
from conf.planner import hardware
from conf.planner.hardware import CPU, GIB, GPUS, NAMES, Gpu
from conf.schema.sections import MOST
from contract.faults import ConfigError, Fault
from flows.arguments import MACHINE

SAME = 0.94  # least share of a kind's memory: drivers and ECC use some, and a half-size card has half


@dataclass(frozen=True)
class Machine:
    """Hosts, GPUs of each, and their kind."""

    kind: str  # as hardware.gpu has it
    gpu: Gpu
    nodes: int
    per_node: int
    why: str

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def shown(self) -> str:
        if not self.gpu.cuda:
            return "this CPU"
        return f"{self.gpus} {self.gpu.name}" + (f" on {self.nodes} hosts" if self.nodes > 1 else "")


def parse(text: str, here: Machine | None = None, why: str = "as asked") -> Machine:
    """Return the machine that a text names. A number alone means GPUs of this host's kind."""
    given = "".join(text.split())
    found = re.fullmatch(r"(?:(\d{1,5})x)?(?:(\d{1,5})x)?([^\d].*)", given) or re.fullmatch(r"(\d{1,5})()()", given)
    if not found:
        raise Fault(f"--gpus: {text or 'nothing'}: not a number of GPUs and their kind, {MACHINE}")
    first, second, kind = found.groups()
    if not kind:
        if here is None or not here.gpu.cuda:
            raise Fault(f"--gpus: {text}: the kind is missing, and this host has no GPU; {MACHINE}")
        kind = here.kind
    try:
        gpu = hardware.read(kind, "--gpus")
    except ConfigError as fault:
        if kind.endswith((".yaml", ".yml")):
            raise
        raise Fault(f"{fault}; {MACHINE}") from None
    count = int(first or 1) * int(second or 1)
    if not 1 <= count <= MOST:
        raise Fault(f"--gpus: {text}: {count} is not a number of GPUs from 1 to {MOST}")
    if not gpu.cuda:
        return Machine(CPU.name, gpu, 1, count, why)
    nodes, per_node = (int(first), int(second)) if second else (max(1, count // gpu.per_host), min(count, gpu.per_host))
    if nodes * per_node != count or per_node > gpu.per_host:
        raise Fault(f"--gpus: {text}: {count} GPUs are not a whole number of hosts of {gpu.per_host} {gpu.name}")
    return Machine(kind.lower() if kind.lower() in NAMES else kind, gpu, nodes, per_node, why)


def of_this_host() -> Machine | None:
    """Return the GPUs of this host that this process may use. Raise a Fault for a kind without a data sheet."""
    there = nvidia_smi.visible()
    if not there:
        return None
    return _described(len(there), nvidia_smi.first())


def _described(count: int, row: str) -> Machine:
    """Return the machine with `count` GPUs of the kind in a row of nvidia-smi: `NVIDIA H100 80GB HBM3, 81559`."""
    name, _, memory = (part.strip() for part in row.rpartition(","))
    size = int(memory) * 2**20 if memory.isdigit() else 0
    gpu = hardware.by_device(name)
    if gpu and SAME * gpu.memory <= size <= gpu.memory / SAME:
        return Machine(gpu.name, gpu, 1, min(count, gpu.per_host), f"the GPUs of this host: {name}")
    known = ", ".join(GPUS)
    raise Fault(
        f"--gpus: this host has {count} {name or 'GPUs'} of {size / GIB:.0f} GiB without a known data sheet "
        f"({known}); --gpus {count}xmy-gpu.yaml takes a file: conf/planner/hardware.py begins with one"
    )
