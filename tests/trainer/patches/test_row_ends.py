"""trainer/patches/families/row_ends.py: the first layer reads the ends of packed rows for all layers."""

import torch

from trainer.patches.families import row_ends


def test_ends_of_packed_rows_are_checked_once_per_micro_batch():
    seen = []
    resolve = row_ends.checked_once(lambda layer, padded, plain, length: seen.append((layer, length)) or plain)
    ends, padded = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 8])
    assert all(resolve(layer, None, ends, 8) is ends for layer in range(3))
    assert resolve(3, padded, ends, 8) is padded
    assert seen == [(0, 8), (3, 8)]


def test_a_tensor_equals_itself_without_a_comparison(monkeypatch):
    own = row_ends.Torch("torch")
    one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert own.equal(one, one.clone()) and not own.equal(one, other) and own.zeros is torch.zeros
    monkeypatch.delattr(torch, "equal")
    assert own.equal(one, one)


def test_chunks_of_rows_are_computed_and_copied_once():
    asked = []
    offsets = row_ends.known(lambda ends, size: asked.append(size) or (ends.diff() // size).cumsum(-1))
    ends = torch.tensor([0, 64, 256])
    found = [offsets(ends, 64) for _ in range(3)] + [offsets(ends, 32)]
    assert [one[-1].item() for one in found] == [4, 4, 4, 8] and asked == [64, 32]
    assert found[0].as_subclass(torch.Tensor).tolist() == [1, 4] and type(found[0][-1]) is torch.Tensor
