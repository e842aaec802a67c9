"""Matrices of an adapter in PEFT's format, as conf/peft_adapter.py describes them."""

import torch
from safetensors import safe_open

from conf.peft_adapter import Adapter, Change


class AdapterFile:
    """Reader of an adapter's tensors. It keeps the last two, as experts are read one after another."""

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self.file = safe_open(str(adapter.folder / next(iter(adapter.entries.values())).file), "pt")
        self.kept: dict[str, torch.Tensor] = {}

    def tensor(self, key: str) -> torch.Tensor:
        if key not in self.kept:
            self.kept = dict([*self.kept.items(), (key, self.file.get_tensor(key))][-2:])
        return self.kept[key]

    def factors(self, change: Change) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of a weight, of shapes [rank, inputs] and [outputs, rank], in fp32."""
        a, b, rank = self.tensor(change.a), self.tensor(change.b), change.rank
        if change.expert is not None:
            own = slice(change.expert * rank, (change.expert + 1) * rank)
            a = a[own]
            b = b[:, own] if change.grouped else b.view(len(b), rank, change.experts)[:, :, change.expert]
        a, b = (b.t(), a.t()) if change.exchanged else (a, b)
        if change.half is not None:
            b = b.chunk(2)[change.half]
        return a.float(), b.float()
