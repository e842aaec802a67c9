"""Format of weights that the trainer sends to vLLM: buckets of tensors, each in one piece of memory.

A message with the names, types, shapes and digests of its tensors precedes each bucket. Only whole tensors are sent,
and the receiver checks every digest before vLLM gets the tensor. A tensor begins at a multiple of ROW bytes: the
digests of a whole bucket are computed in one pass on its device. Each word is multiplied by an odd number that depends
on its place (trainer/weights/digests.py), and a tensor's digest is the sum over its rows.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any

import torch

from contract.faults import Fault
from trainer.patches import store_address
from trainer.weights import digests

BUCKET = 64 << 20  # bytes
BUCKET_OF_GPU = 256 << 20  # in shared memory of a GPU
WORDS = 1024  # of 8 bytes
ROW = 8 * WORDS
PATIENCE = timedelta(minutes=10)
MEETS = timedelta(minutes=1)  # for a process of another host to connect
POLL = 0.0005  # seconds
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Meta:
    """Description of a tensor that is sent, without its values."""

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
    memory: torch.Tensor  # may be longer than the used part

    @property
    def used(self) -> int:
        return used(self.metas)

    @property
    def bytes(self) -> torch.Tensor:
        return self.memory[: self.used]


def meta(name: str, tensor: torch.Tensor) -> Meta:
    """Description of a tensor that is not sent in a bucket, for example in a file."""
    whole = tensor if tensor.ndim else tensor.reshape(1)
    return Meta(name, dtype(tensor), tuple(tensor.shape), digests.digest(whole))


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], allocate: Callable[[int], torch.Tensor], size: int
) -> Iterator[Bucket]:
    """Tensors in buckets of at most `size` bytes, or of one larger tensor.

    There are two pieces of memory, filled in turn: while a bucket is read, the next one is filled. When the caller gets
    a bucket, the previous one must have been read.
    """
    memories: list[torch.Tensor | None] = [None, None]
    group: list[Meta] = []
    turn = at = 0
    for name, tensor in tensors:
        meta = Meta(name, dtype(tensor), tuple(tensor.shape), digest="")
        end = at + _rows(meta.bytes) * ROW
        if group and end > size:
            yield _bucket(group, memories[turn])
            group, turn, at, end = [], 1 - turn, 0, end - at
        memory = memories[turn]
        if memory is None or end > len(memory):
            memories[turn] = memory = allocate(max(end, size))
        part(memory, meta, at).copy_(tensor.detach())
        memory[at + meta.bytes : end].zero_()
        group.append(meta)
        at = end
    if group:
        yield _bucket(group, memories[turn])


def taken_apart(metas: Sequence[Meta], memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a bucket, as views of its memory. Raises a Fault that names the first damaged tensor."""
    for meta, digest in zip(metas, _digests(memory, metas), strict=True):
        if digest != meta.digest:
            raise Fault(f"transfer of weights: {meta.name} is not what was sent: digest {digest}, not {meta.digest}")
    return [(meta.name, part(memory, meta, place)) for meta, place in placed(metas)]


def part(memory: torch.Tensor, meta: Meta, place: int) -> torch.Tensor:
    """A tensor of a bucket that begins at this byte of its memory."""
    return memory[place : place + meta.bytes].view(getattr(torch, meta.dtype)).view(meta.shape)


def placed(metas: Sequence[Meta]) -> list[tuple[Meta, int]]:
    """Tensors of a bucket, each with its first byte."""
    return list(zip(metas, accumulate((_rows(meta.bytes) * ROW for meta in metas), initial=0), strict=False))


def used(metas: Sequence[Meta]) -> int:
    """Bytes of a bucket that its tensors use; each takes whole rows."""
    return sum(_rows(meta.bytes) for meta in metas) * ROW


def require(sent: Meta, tensor: torch.Tensor) -> None:
    """Raise a Fault unless a tensor that was not sent in a bucket is what was sent."""
    received = meta(sent.name, tensor)
    if received != sent:
        difference = f"{received.shape}, not {sent.shape}"
        if received.shape == sent.shape:
            difference = f"digest {received.digest}, not {sent.digest}"
        raise Fault(f"transfer of weights: {sent.name} is not what was sent: {difference}")


def _bucket(group: Sequence[Meta], memory: torch.Tensor | None) -> Bucket:
    assert memory is not None
    pairs = zip(group, _digests(memory, group), strict=True)
    return Bucket([replace(meta, digest=digest) for meta, digest in pairs], memory)


def _digests(memory: torch.Tensor, metas: Sequence[Meta]) -> list[str]:
    """Digests of a bucket's tensors."""
    ends = [*accumulate((_rows(meta.bytes) for meta in metas), initial=0)]
    rows = memory[: ends[-1] * ROW].view(torch.int64).view(-1, WORDS)
    sums = (rows * digests.place_factors(0, 0, WORDS, memory.device)).sum(-1)
    of_tensors = of_rows(sums, torch.tensor(ends, device=memory.device))
    return [digests.text(number) for number in of_tensors.tolist()]


def of_rows(sums: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Digest of each tensor, from the sums of all rows and the first row of each tensor and of the end."""
    rows = sums * digests.place_factors(1, 0, len(sums), sums.device)
    return torch.cat([rows.new_zeros(1), rows.cumsum(0)])[ends].diff()


def _rows(size: int) -> int:
    return -(-size // ROW)


def dtype(tensor: torch.Tensor) -> str:
    """Name of a tensor's type, as in a Meta."""
    return str(tensor.dtype).removeprefix("torch.")


class Pipe:
    """A connection of processes for tensors: over NCCL from GPU to GPU, or over gloo. The trainer has rank 0.

    All workers of one engine are at the other end and get the same tensors. NCCL would wait for ever for a process that
    has ended, so `gone` returns whether the engine has ended. gloo notices this on the same host, but not if another
    host is lost, so `seconds` limits the transfer of a tensor.
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
            # A kernel that fills the next bucket uses the whole GPU. With high priority, sending does not wait for it.
            options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = meets
            self.group = ProcessGroupNCCL(self.store, rank, count, options)

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all others."""
        self.finish(self.broadcast(tensor.to(self.device), self.rank))

    def receive(self, size: int) -> torch.Tensor:
        """Receive a tensor: on rank 0 from rank 1, on other ranks from rank 0."""
        tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.finish(self.broadcast(tensor, 0 if self.rank else 1))
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Any:
        """Start sending a tensor, or receiving into it. On a GPU, later operations must call the work's wait()."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.group.broadcast([tensor], options)

    def finish(self, work: Any) -> None:
        """Wait until a tensor is transferred. Raises a RuntimeError if the other process has ended, as gloo does."""
        while self.device.type != "cpu" and not work.is_completed():
            if self.gone():
                self.group.abort()
                raise RuntimeError("the other process has ended")
            time.sleep(POLL)
        work.wait(self.within)
