"""Weights on their way from the trainer to vLLM, as both sides know them: buckets of tensors in one piece of memory.

A bucket goes over gloo behind a message that names its tensors with their types, shapes and digests
(trainer/weights/digests.py). Only whole tensors are sent, and the receiver looks at every digest before vLLM sees it.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch

from contract.faults import Fault
from trainer.weights import digests

BUCKET = 64 << 20  # bytes
PATIENCE = timedelta(minutes=10)


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


def meta(name: str, tensor: torch.Tensor) -> Meta:
    whole = tensor if tensor.ndim else tensor.reshape(1)
    return Meta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digests.digest(whole))


def buckets(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[Meta, torch.Tensor]]]:
    """Tensors in groups that have at most BUCKET bytes, or one tensor."""
    group, size = [], 0
    for name, tensor in tensors:
        one = meta(name, tensor)
        if group and size + one.bytes > BUCKET:
            yield group
            group, size = [], 0
        group.append((one, tensor))
        size += one.bytes
    if group:
        yield group


def joined(bucket: list[tuple[Meta, torch.Tensor]]) -> torch.Tensor:
    """The bytes of a bucket's tensors, in this host's memory."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for _, tensor in bucket])


def taken_apart(metas: list[Meta], joined: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a bucket. Raises a Fault that names the first that is not what was sent."""
    at = 0
    for one in metas:
        # a copy, as a type of more bytes has to begin at a multiple of them
        piece = joined[at : at + one.bytes].clone().view(getattr(torch, one.dtype)).view(one.shape)
        require(one, piece)
        yield one.name, piece
        at += one.bytes


def require(sent: Meta, found: torch.Tensor) -> None:
    if meta(sent.name, found) != sent:
        raise Fault(f"transfer of weights: {sent.name} is not what was sent: {_told(found, sent)}")


def _told(found: torch.Tensor, sent: Meta) -> str:
    now = meta(sent.name, found)
    return f"digest {now.digest}, not {sent.digest}" if now.shape == sent.shape else f"{now.shape}, not {sent.shape}"


class Pipe:
    """A connection of two processes of one host for tensors."""

    def __init__(self, port: int, rank: int):
        from torch.distributed import ProcessGroupGloo, TCPStore

        self.rank = rank
        self.store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=PATIENCE, wait_for_workers=False)
        self.group = ProcessGroupGloo(self.store, rank, 2, PATIENCE)

    def send(self, tensor: torch.Tensor) -> None:
        self.group.send([tensor], 1 - self.rank, 0).wait()

    def receive(self, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        self.group.recv([tensor], 1 - self.rank, 0).wait()
        return tensor
