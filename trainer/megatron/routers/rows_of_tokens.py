"""Rows of the data that the tokens of a micro batch belong to; several rows may share a sequence."""

from typing import NamedTuple

import torch

SHORTEST = 16  # least tokens of a packed row, with padding


class Rows(NamedTuple):
    """Rows of a micro batch: first for the routers of the model, then for those of each MTP layer.

    An MTP layer at depth d looks d tokens further ahead, so each row has d tokens fewer for it.
    """

    number: torch.Tensor  # [depths, tokens of this rank] the row of each token; the last number means padding
    length: torch.Tensor  # [depths, rows + 1] tokens of each row on all ranks
    share: torch.Tensor  # [depths, rows + 1] weight of each of these tokens


def rows_of(mask: torch.Tensor, cut: torch.Tensor | None, depths: int, weight: int | None = None) -> Rows:
    """Return the rows of whole sequences, from loss mask and ends of packed rows.

    `number` is then [depths, sequences, tokens].
    """
    sequences, tokens = mask.shape
    place = torch.arange(tokens, device=mask.device)
    if cut is None:
        row, count = torch.arange(sequences, device=mask.device)[:, None].expand(-1, tokens), sequences
    else:
        row = torch.searchsorted(cut[0, 1:].contiguous().long(), place, right=True)[None]
        count = max(cut.size(1), tokens // SHORTEST + 2)  # the same size for all batches: CUDA graphs need it
    flat, places = row.flatten(), place.expand_as(row).flatten()
    learned = torch.zeros(count, device=mask.device).index_add_(0, flat, mask.float().flatten())
    if weight is not None:
        learned = (learned > 0).float() * weight
    first = torch.full((count,), tokens, device=mask.device).scatter_reduce_(0, flat, places, "amin")
    ends = torch.where(mask > 0, place + 1, 0).flatten()
    end = torch.zeros(count, dtype=torch.long, device=mask.device).scatter_reduce_(0, flat, ends, "amax")
    number, length, share = [], [], []
    for depth in range(depths):
        size = (end - first - depth).clamp(min=0)
        number.append(torch.where(end[row] - place > depth, row, count))
        length.append(torch.nn.functional.pad(size.clamp(min=1).float(), (0, 1), value=1.0))
        share.append(torch.nn.functional.pad(torch.where(size > 0, learned / length[-1][:-1], 0.0), (0, 1)))
    return Rows(torch.stack(number), torch.stack(length), torch.stack(share))
