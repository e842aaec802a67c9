"""Weights on their way from the trainer to vLLM, as both sides know them: buckets of tensors in one piece of memory.

A bucket goes over behind a message that names its tensors with their types, shapes and digests. Only whole tensors are
sent, and the receiver looks at every digest before vLLM sees it. A tensor begins at a multiple of ROW bytes, so that
the digests of a whole bucket take one pass over it, on the device where it lies: each of its words counts times an odd
number that its place gives (trainer/weights/digests.py), and a tensor's digest is the sum over its rows.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any

import torch

from contract.faults import Fault
from trainer.patches import store_address
from trainer.weights import digests

BUCKET = 64 << 20  # bytes
BUCKET_OF_GPU = 256 << 20  # of memory that both sides see
WORDS = 1024  # of 8 bytes
ROW = 8 * WORDS
PATIENCE = timedelta(minutes=10)
MEETS = timedelta(minutes=1)  # for a process of another host
POLL = 0.0005  # seconds
HOST = torch.device("cpu")

Sent = tuple[str, str, tuple[int, ...], int]  # name, type, shape and bytes


@dataclass(frozen=True)
class Meta:
    """A tensor that is sent, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors in a piece of memory."""

    metas: list[Meta]
    memory: torch.Tensor  # longer than what is used of it

    @property
    def used(self) -> int:
        return used(self.metas)

    @property
    def bytes(self) -> torch.Tensor:
        return self.memory[: self.used]


def meta(name: str, tensor: torch.Tensor) -> Meta:
    """A tensor that goes by itself, as in a file."""
    whole = tensor if tensor.ndim else tensor.reshape(1)
    return Meta(name, dtype(tensor), tuple(tensor.shape), digests.digest(whole))


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], allocate: Callable[[int], torch.Tensor], size: int
) -> Iterator[Bucket]:
    """Tensors in buckets of at most so many bytes, or of one tensor.

    There are two pieces of memory, filled in turn: while a bucket is read, the next is filled, and when it comes, the
    reader has to be done with the one before.
    """
    memories: list[torch.Tensor | None] = [None, None]
    group: list[Sent] = []
    turn = at = 0
    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        end = at + _rows(count) * ROW
        if group and end > size:
            yield _bucket(group, memories[turn])
            group, turn, at, end = [], 1 - turn, 0, end - at
        memory = memories[turn]
        if memory is None or end > len(memory):
            memories[turn] = memory = allocate(max(end, size))
        memory[at : at + count].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        memory[at + count : end].zero_()
        group.append((name, dtype(tensor), tuple(tensor.shape), count))
        at = end
    if group:
        yield _bucket(group, memories[turn])


def taken_apart(metas: Sequence[Meta], memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a bucket, which lie in its memory. Raises a Fault that names the first that is not what was sent."""
    sizes = [one.bytes for one in metas]
    for one, digest in zip(metas, _digests(memory, sizes), strict=True):
        if digest != one.digest:
            raise Fault(f"transfer of weights: {one.name} is not what was sent: digest {digest}, not {one.digest}")
    return [(one.name, part(memory, one, place)) for one, place in placed(metas)]


def part(memory: torch.Tensor, one: Meta, place: int) -> torch.Tensor:
    """A tensor of a bucket, which begins at a byte of its memory."""
    return memory[place : place + one.bytes].view(getattr(torch, one.dtype)).view(one.shape)


def placed(metas: Sequence[Meta]) -> list[tuple[Meta, int]]:
    """Tensors of a bucket, each with the byte at which it begins."""
    return list(zip(metas, accumulate((_rows(one.bytes) * ROW for one in metas), initial=0), strict=False))


def used(metas: Sequence[Meta]) -> int:
    """The bytes of a bucket that its tensors take, each whole rows."""
    return sum(_rows(one.bytes) for one in metas) * ROW


def require(sent: Meta, found: torch.Tensor) -> None:
    """Require that a tensor that went by itself is what was sent."""
    now = meta(sent.name, found)
    if now != sent:
        alike = now.shape == sent.shape
        told = f"digest {now.digest}, not {sent.digest}" if alike else f"{now.shape}, not {sent.shape}"
        raise Fault(f"transfer of weights: {sent.name} is not what was sent: {told}")


def _bucket(group: Sequence[Sent], memory: torch.Tensor | None) -> Bucket:
    assert memory is not None
    found = _digests(memory, [size for *_, size in group])
    metas = [Meta(name, kind, shape, digest) for (name, kind, shape, _), digest in zip(group, found, strict=True)]
    return Bucket(metas, memory)


def _digests(memory: torch.Tensor, sizes: Sequence[int]) -> list[str]:
    """Digests of tensors of so many bytes, which lie in the memory one behind another."""
    ends = [*accumulate(map(_rows, sizes), initial=0)]
    rows = memory[: ends[-1] * ROW].view(torch.int64).view(-1, WORDS)
    of_rows = (rows * digests.place_factors(0, 0, WORDS, memory.device)).sum(-1)
    of_rows *= digests.place_factors(1, 0, len(rows), memory.device)
    until = torch.cat([of_rows.new_zeros(1), of_rows.cumsum(0)])
    found = until[torch.tensor(ends, device=memory.device)].diff()
    return [digests.text(number) for number in found.tolist()]


def _rows(size: int) -> int:
    return -(-size // ROW)


def dtype(tensor: torch.Tensor) -> str:
    """Name of a tensor's type, as a Meta has it."""
    return str(tensor.dtype).removeprefix("torch.")


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pipe:
    """A connection of processes for tensors: over NCCL from GPU to GPU, or over gloo. The trainer has rank 0.

    Behind it are all workers of one engine, which are sent the same. NCCL would wait for ever for a process that has
    ended: `gone` says that the engine has. gloo notices that by itself on one host; a host that is gone says nothing,
    so that a tensor may have `seconds` to go over.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        device: torch.device = HOST,
        gone: Callable[[], bool] = lambda: False,
        seconds: float | None = None,
        workers: int = 1,
    ):
        from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, TCPStore

        self.rank, self.device, self.gone = rank, device, gone
        self.within = timedelta(seconds=seconds) if seconds else PATIENCE
        meets, count = MEETS if seconds else PATIENCE, 1 + workers
        if rank == 0:
            self.store = store_address.listen(host, port, world_size=count, timeout=meets, wait_for_workers=False)
        else:
            self.store = TCPStore(host, port, count, is_master=False, timeout=meets)
        if device.type == "cpu":
            self.group: Any = ProcessGroupGloo(self.store, rank, count, meets)
        else:
            # A kernel that fills the next bucket takes all of a GPU, and the sending of this one is not to wait for it.
            options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = meets
            self.group = ProcessGroupNCCL(self.store, rank, count, options)

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all others."""
        self.finish(self.broadcast(tensor.to(self.device), self.rank))

    def receive(self, size: int) -> torch.Tensor:
        """Receive what rank 0 sends, or rank 1 to rank 0."""
        tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.finish(self.broadcast(tensor, 0 if self.rank else 1))
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Any:
        """Begin to send a tensor, or to receive into it. What follows on a GPU waits by the work's own wait()."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.group.broadcast([tensor], options)

    def finish(self, work: Any) -> None:
        """Wait until a tensor has gone over. Raises a RuntimeError where the other process has ended, as gloo does."""
        while self.device.type != "cpu" and not work.is_completed():
            if self.gone():
                self.group.abort()
                raise RuntimeError("the other process has ended")
            time.sleep(POLL)
        work.wait(self.within)
