"""Digests of all tensors of a transfer that is repeated, gathered bucket by bucket, and known on the host at its end.

As those of a bucket (trainer/reinforcement/transfer/wire.py), but for the rows, which are numbered through all buckets.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from trainer.reinforcement.transfer import wire
from trainer.weights import digests


class Totals:
    def __init__(self, buckets: Sequence[Sequence[wire.Meta]], device: torch.device):
        self.first = [*accumulate((wire.used(metas) // wire.ROW for metas in buckets), initial=0)]
        # The row that each tensor begins with, and behind the last one the row that it ends before.
        begins = [
            start + place // wire.ROW
            for start, metas in zip(self.first, buckets, strict=False)
            for _, place in wire.placed(metas)
        ]
        rows = torch.tensor([*begins, self.first[-1]], pin_memory=device.type == "cuda")
        self.ends = rows.to(device, non_blocking=True)
        self.factors = digests.place_factors(0, 0, wire.WORDS, device)
        self.sums = torch.empty(self.first[-1], dtype=torch.int64, device=device)

    def add(self, number: int, memory: torch.Tensor) -> None:
        """Add the rows of a bucket."""
        out = self.sums[self.first[number] : self.first[number + 1]]
        if memory.is_cuda:
            from trainer.reinforcement.transfer.repeated import kernels

            kernels.row_sums(memory, self.factors, out)
        else:
            torch.sum(memory.view(torch.int64).view(-1, wire.WORDS) * self.factors, -1, out=out)

    def found(self) -> torch.Tensor:
        """A number for each tensor, in the order of all buckets."""
        rows = self.sums * digests.place_factors(1, 0, len(self.sums), self.sums.device)
        return torch.cat([rows.new_zeros(1), rows.cumsum(0)])[self.ends].diff()
