"""trainer/training/host_copies.py: each tensor of a checkpoint is copied once."""

import io

import torch

from trainer.training.host_copies import HostCopies


def test_a_part_of_a_buffer_on_the_host_is_copied_once():
    """megatron-core clones a tensor with a larger storage."""
    copies, buffer, text = HostCopies(), torch.arange(8.0), io.BytesIO()
    copy = copies.own(buffer[2:5])
    buffer.zero_()
    assert copy.tolist() == [2, 3, 4] and copy.untyped_storage().size() == copy.numel() * copy.itemsize
    assert copies.own(copy) is copy
    assert copies.own(text) is text
