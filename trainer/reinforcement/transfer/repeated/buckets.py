"""The buckets of a repeated transfer, which both sides know: the size of each, and the digests of all tensors.

The layout is computed once, because it takes Python code for each tensor. Digests are computed as for a single bucket
(trainer/reinforcement/transfer/wire.py), except that rows are numbered through all buckets. They are collected bucket
by bucket, and reach the host at the end.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch

from trainer.reinforcement.transfer import wire
from trainer.weights import digests


class Buckets:
    def __init__(self, metas: Sequence[Sequence[wire.Meta]], device: torch.device):
        self.bytes = sum(meta.bytes for meta in chain.from_iterable(metas))
        self.used = [*map(wire.used, metas)]
        self.first = [*accumulate((size // wire.ROW for size in self.used), initial=0)]  # rows
        # The first row of each tensor, and the row after the last tensor.
        begins = [
            start + place // wire.ROW
            for start, of_bucket in zip(self.first, metas, strict=False)
            for _, place in wire.placed(of_bucket)
        ]
        self.ends = torch.tensor([*begins, self.first[-1]]).to(device)
        self.factors = digests.place_factors(0, 0, wire.WORDS, device)
        self.sums = self.factors.new_empty(0)  # of each row, in a transfer

    def begin(self) -> None:
        """Begin a transfer."""
        self.sums = torch.empty(self.first[-1], dtype=torch.int64, device=self.ends.device)

    def rooms(self, allocate: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Memory for each bucket: two pieces with the size of the largest bucket, used in turn."""
        two = [allocate(max(self.used)) for _ in self.used[:2]]
        return [two[number % 2] for number in range(len(self.used))]

    def add(self, number: int, memory: torch.Tensor) -> None:
        """Add the rows of a bucket."""
        out = self.sums[self.first[number] : self.first[number + 1]]
        if memory.is_cuda:
            from trainer.reinforcement.transfer.repeated import kernels

            kernels.row_sums(memory, self.factors, out)
        else:
            torch.sum(memory.view(torch.int64).view(-1, wire.WORDS) * self.factors, -1, out=out)

    def digests(self) -> torch.Tensor:
        """Digest of each tensor, in the order of all buckets."""
        sums, self.sums = self.sums, self.sums.new_empty(0)
        return wire.of_rows(sums, self.ends)
