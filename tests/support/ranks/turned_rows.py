"""Print, as JSON, what the patch of packed rows does beside megatron-core's own: for test_packed_positions.py."""

import itertools
import json

from conf.schema.run import Run
from trainer.startup import device


def main(run: Run) -> None:
    device.start()
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from trainer.patches import packed_positions

    upstream, calls, turn = rope_utils._apply_rotary_pos_emb_thd, [], rope_utils._apply_rotary_pos_emb_bshd

    def counted(*given, **named):
        calls.append(1)
        return turn(*given, **named)

    rope_utils._apply_rotary_pos_emb_bshd = counted
    different, generator = [], torch.Generator().manual_seed(7)
    lengths = [8, 16, 0, 24, 8, 0, 40, 0]  # a padded list repeats its end
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    for ranks, going_on, latent in itertools.product((1, 2, 4), (False, True), (False, True)):
        freqs = torch.rand(sum(lengths) if going_on else 64, 1, 1, 8, generator=generator) * 6
        for rank in range(ranks):
            given = torch.randn(sum(lengths) // ranks, 3, 12, generator=generator)
            found = []
            for function in (upstream, packed_positions.rotated):
                t = given.clone().requires_grad_()
                settings = dict(mla_rotary_interleaved=latent, mscale=1.25, cp_group=_Ranks(ranks, rank))
                out = function(t, cu_seqlens, freqs, **settings)
                (out * out.detach().sin()).sum().backward()
                found.append((out.detach(), t.grad))
            if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
                different.append([ranks, rank, going_on, latent])

    counts = []
    for function in (upstream, packed_positions.rotated):
        calls.clear()
        function(torch.randn(8, 2, 4), torch.tensor([0, 3, 8]), torch.rand(9, 1, 1, 4), cp_group=_Ranks(1, 0))
        counts.append(len(calls))
    computed = packed_positions._computed
    packed_positions._computed = lambda *given: calls.append(1) or computed(*given)
    calls.clear()
    cu_seqlens = torch.tensor([0, 3, 8])
    for _ in range(3):
        packed_positions._positions(cu_seqlens, 8, 1, 0, False)
    print(json.dumps({"different": different, "upstream": counts[0], "patched": counts[1], "computed": len(calls)}))


class _Ranks:
    """A process group's size and rank, without a process group."""

    def __init__(self, size: int, rank: int):
        self.counts = size, rank

    def size(self) -> int:
        return self.counts[0]

    def rank(self) -> int:
        return self.counts[1]
