"""A tensor's digest is the same however it is cut, and another for whatever is changed in it."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from trainer.weights import digests, torch_dist


def pieces(whole: torch.Tensor, cuts: tuple[int, ...]):
    """The tensor cut into so many parts along each dimension, with where each begins."""
    spans = [range(0, n, n // cut) for n, cut in zip(whole.shape, cuts, strict=True)]
    for starts in itertools.product(*spans):
        part = whole
        for dim, (start, n, cut) in enumerate(zip(starts, whole.shape, cuts, strict=True)):
            part = part.narrow(dim, start, n // cut)
        yield part, starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_the_digest_is_the_sum_of_the_pieces_digests(dtype, monkeypatch):
    monkeypatch.setattr(digests, "AT_ONCE", 64)  # so that a piece is itself taken in parts
    whole = (torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    expected = digests.digest(whole)
    for cuts in ((1, 1, 1), (2, 1, 1), (1, 3, 2), (4, 12, 6)):
        parts = (int(digests.sums(part, starts)) for part, starts in pieces(whole, cuts))
        assert digests.text(sum(parts)) == expected


def test_experts_and_layers_have_digests_of_their_own():
    whole = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(2))
    by_index = digests.sums(whole[:, 1:], (0, 1, 0, 0), depth=2)
    for layer, expert in itertools.product(range(2), range(2)):
        assert digests.text(int(by_index[layer, expert])) == digests.digest(whole[layer, expert + 1])


def test_any_change_to_a_tensor_changes_its_digest():
    """One bit, two rows or columns that change places, the transpose, zeros where another tensor's zeros end."""
    draw, seen = random.Random(3), set()
    whole = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    changed = [whole, whole.T, whole.view(8, 32), whole.flatten(), whole.roll(1, 0), whole.roll(1, 1), -whole]
    changed += [whole[[1, 0, *range(2, 16)]], whole[:, [1, 0, *range(2, 16)]], whole.float()]
    for _ in range(500):
        flipped = whole.clone()
        flipped.view(torch.int16)[draw.randrange(16), draw.randrange(16)] ^= 1 << draw.randrange(15)
        changed.append(flipped)
    distinct = {
        tensor.numpy(force=True).tobytes()
        if tensor.dtype != torch.bfloat16
        else (tensor.shape, tensor.contiguous().view(torch.int16).numpy().tobytes())
        for tensor in changed
    }
    seen = {digests.digest(tensor) for tensor in changed}
    assert len(seen) == len(distinct) > 400


CASES = [
    ("glm4-moe-mtp", "lora", "tp=2 sp=true ep=2 etp=2 gpus_per_node=4"),
    ("llama", "dora", "tp=2 sp=true gpus_per_node=2"),
    ("qwen3-moe", "lora", ""),
    ("qwen3-moe", "lora", "pp=2 gpus_per_node=2"),
    ("glm4-moe-mtp", "lora", "pp=2 vpp=2 gpus_per_node=2"),
    ("glm4-moe-mtp", "shared", "ep=2 gpus_per_node=2"),
    ("glm4-moe-mtp", "shared", "tp=2 sp=true ep=2 etp=2 gpus_per_node=4"),
    ("glm4-moe-mtp", "none", ""),
    ("glm4-moe-mtp", "none", "tp=2 sp=true ep=2 gpus_per_node=2"),
    ("deepseek-v3", "none", "pp=2 ep=2 gpus_per_node=4"),
    ("llama", "none", "tp=2 gpus_per_node=2"),
]
QUICK = ("glm4-moe-mtp", "none", "tp=2 sp=true ep=2 gpus_per_node=2")  # two processes cut in most ways what four do


@pytest.mark.parametrize(
    ("kind", "adapter", "layout"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_what_is_saved_has_the_digests_of_what_is_in_memory(kind, adapter, layout, configure, ranks, base, work):
    """Held against one another tensor by tensor, at a layout that cuts them in every way."""
    base(kind)
    output = work / "digests" / f"{kind}-{adapter}-{layout}.".replace(" ", "-")
    kinds = ["adapter.experts=shared"] if adapter == "shared" else [f"adapter.kind={adapter}"]
    cut = [f"layout.{pair}" for pair in layout.split()]
    run = configure(kind, f"paths.output={output}", "train.steps=2", f"paths.parity={output}/parity.json", *kinds, *cut)
    result = ranks("train", run)
    assert result.code == 0, result.output
    stored = torch_dist.open_checkpoint(Path(output) / "checkpoints/iter_0000002")
    assert len(stored.digests) > 20
    torch_dist.require_all(stored)
    for place in stored.places.values():
        torch_dist.read(stored, place)  # raises what differs
    if adapter == "shared":
        of_experts = [place for name, place in stored.places.items() if ".experts." in name]
        assert of_experts and all(len(place.chunks) <= 4 for place in of_experts), "one copy, not one for each expert"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size, offset", [(1, 0), (3, 1), (8, 2), (17, 4), (1001, 3)])
def test_each_flipped_bit_changes_the_sum_of_words(dtype, size, offset):
    draw = random.Random(size)
    tensor = (torch.rand(size + offset, generator=torch.Generator().manual_seed(1)) * 99).to(dtype)[offset:]
    before, changing = tensor.clone(), tensor.view(torch.uint8)
    whole = int(digests.sum_of_words([tensor, before]))
    for _ in range(20):
        place, bit = draw.randrange(len(changing)), 1 << draw.randrange(8)
        changing[place] ^= bit
        assert int(digests.sum_of_words([tensor, before])) != whole
        changing[place] ^= bit
    assert int(digests.sum_of_words([tensor, before])) == whole
