"""Kinds of kernels, collectives and calls, by their names in NVIDIA's libraries, torch and Triton."""

import re

# The first pattern that matches a kernel's name decides; case does not matter.
NAMES = (
    ("all-gather", r"nccl\w*_AllGather"),
    ("reduce-scatter", r"nccl\w*_ReduceScatter"),
    ("all-reduce", r"nccl\w*_AllReduce"),
    ("broadcast", r"nccl\w*_Broadcast|nccl\w*_Reduce_"),
    ("send, receive, all-to-all", r"nccl\w*_SendRecv|nccl\w*_AllToAll"),
    ("other collectives", r"nccl"),
    ("copy from the host", r"memcpy HtoD"),
    ("copy to the host", r"memcpy DtoH"),
    ("copy on the device", r"memcpy"),
    ("fill", r"memset"),
    ("attention", r"fmha|flash|attention|sdpa|cudnn_generated\w*(bprop|fprop)|softmax_(forward|backward).*mask"),
    ("matrix products", r"gemm|cutlass|nvjet|cublas|xmma|wgmma|splitK|_mm_"),
    ("loss", r"cross_entropy|log_?softmax|nll_loss|online_softmax"),
    ("optimizer", r"multi_tensor|adam|l2norm"),
    ("norm", r"norm"),
    ("FP8 casts", r"fp8|quantiz|cast_transpose|transpose_cast|amax"),
    ("positions (RoPE)", r"rope|rotary"),
    ("experts' order", r"permut|topk|sort|scatter|gather|index|histogram|bincount|router|scan|nonzero|unique|radix"),
    ("joins of tensors", r"CatArray|cat_|split"),
    ("copies and casts", r"direct_copy|copy_|cast|transpose"),
    ("reductions", r"reduce"),
    ("element-wise", r"elementwise|vectorized|triton|swiglu|silu|gelu|act|dropout"),
)  # fmt: skip
COLLECTIVES = {name for name, _ in NAMES[:6]}
COPIES = {name for name, _ in NAMES[6:10]}  # done by copy engines, or by kernels that do not compute
OTHER = "other"
_NAMES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in NAMES]

# Calls in which the host waits until the device has finished.
WAITS = re.compile(r"^cuda(Device|Stream|Event)Synchronize|^cu(Ctx|Stream|Event)Synchronize|^cudaMemcpy$|^cudaFree")
STARTS = re.compile(r"Launch|Memcpy|Memset")  # calls that give the device work

WIDTHS = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}
WIDTHS |= {"Float8_e4m3fn": 1, "Float8_e5m2": 1}


def of(name: str) -> str:
    """Kind of a kernel, a copy or a fill."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)
