"""The base class of quantised tensors; no tensor is quantised here."""

import torch


class QuantizedTensor(torch.Tensor):
    pass
