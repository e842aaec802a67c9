"""Kernels that move data, the loss and the optimizer: a section of calibrate.py.

They run as in training: without torch's compiler, which makes one kernel of several (trainer/startup/device.py).
"""

# pyright: reportArgumentType=false, reportMissingImports=false

from typing import Any

from calibrate import EXPERTS, HIDDEN, INNER, TOKENS, VOCAB, ms, normal, tried


def moved() -> None:
    from trainer.startup import device

    device.start()
    for name, measure in {
        "copy": copy,
        "add": add,
        "norm": norm,
        "swiglu": swiglu,
        "swiglu of experts": expert_swiglu,
        "dropout": dropout,
        "permute": permute,
        "rotate": rotate,
        "loss": loss,
        "FusedAdam": fused_adam,
        "gradient added in fp32": added,
        "bus": bus,
        "AdamW on the host": host_adam,
    }.items():
        tried(name, measure)


def rate(took: float, size: float) -> dict[str, Any]:
    return {"ms": took, "GB/s": size / took / 1e6}


def both(function, inputs: list, size_forward: float, size_backward: float) -> dict[str, Any]:
    """Measure forward and backward of a function of one tensor."""
    import torch

    out: list[Any] = []

    def fresh() -> None:
        for tensor in inputs:
            tensor.grad = None
        out[:] = [function(*inputs)]

    forward, gradient = ms(lambda: function(*inputs)), torch.randn_like(function(*inputs))
    backward = ms(lambda: out[0].backward(gradient), before=fresh)
    back = rate(backward, size_backward)
    return rate(forward, size_forward) | {"ms_backward": back["ms"], "GB/s_backward": back["GB/s"]}


def copy() -> dict[str, Any]:
    one = normal(2**30)
    other = one.clone()
    return rate(ms(lambda: other.copy_(one)), 2 * one.numel() * 2)


def add() -> dict[str, Any]:
    one, other = normal(TOKENS * 4, HIDDEN), normal(TOKENS * 4, HIDDEN)
    return rate(ms(lambda: one + other), 3 * one.numel() * 2)


def norm() -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te

    layer, rows = te.RMSNorm(HIDDEN, params_dtype=torch.bfloat16), normal(TOKENS * 4, HIDDEN, grad=True)
    return both(layer, [rows], 2 * rows.numel() * 2, 3 * rows.numel() * 2)


def swiglu() -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    rows = normal(TOKENS, 2 * 12288, grad=True)
    return both(lambda x: bias_swiglu_impl(x, None), [rows], 1.5 * rows.numel() * 2, 2.5 * rows.numel() * 2)


def expert_swiglu() -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    rows, weights = normal(TOKENS * 8, 2 * INNER, grad=True), normal(TOKENS * 8, 1, dtype="float32")
    size = rows.numel() * 2
    return both(lambda x: weighted_bias_swiglu_impl(x, None, weights), [rows], 1.5 * size, 2.5 * size)


def dropout() -> dict[str, Any]:
    import torch

    rows = normal(TOKENS * 4, HIDDEN, grad=True)
    size = rows.numel()
    return both(lambda x: torch.nn.functional.dropout(x, 0.05), [rows], 5 * size, 5 * size)


def permute() -> dict[str, Any]:
    import torch
    from megatron.core.transformer.moe.moe_utils import permute

    rows = normal(TOKENS, HIDDEN, grad=True)
    taken = torch.rand(TOKENS, EXPERTS, device="cuda").topk(8, 1).indices
    routes = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device="cuda").scatter_(1, taken, True)
    size = 9 * rows.numel() * 2

    def function(x):
        return permute(x, routes, num_out_tokens=TOKENS * 8, fused=True)[0]

    return both(function, [rows], size, size)


def rotate() -> dict[str, Any]:
    import torch
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    query = normal(TOKENS, 1, 96, 128, grad=True)
    angles = RotaryPositionEmbedding(128)(TOKENS).to(torch.device("cuda"))
    size = 2 * query.numel() * 2
    return both(lambda x: apply_rotary_pos_emb(x, angles, fused=True), [query], size, size)


def loss() -> dict[str, Any]:
    """Measure the loss of one microbatch of GLM-4.7, and the bytes above its logits at the fullest moment."""
    import torch
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = alone()
    logits = normal(TOKENS, 1, VOCAB, grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS, 1), device="cuda")
    found = both(lambda x: fused_vocab_parallel_cross_entropy(x, labels, group), [logits], 1, 1)
    logits.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_vocab_parallel_cross_entropy(logits, labels, group).sum().backward()
    more = torch.cuda.max_memory_allocated() - before
    took = found["ms"] + found["ms_backward"]
    return {"forward": found["ms"], "backward": found["ms_backward"], "logits": logits.numel(), "peak_bytes": more} | {
        "ns_per_logit": took * 1e6 / logits.numel()
    }


def alone():
    import os

    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29418", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl")
    return torch.distributed.group.WORLD


def fused_adam() -> dict[str, Any]:
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    weights = [normal(10**7, dtype="float32", grad=True) for _ in range(50)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = FusedAdam(weights, lr=1e-4)
    took = ms(optimizer.step)
    return rate(took, 28 * 5e8) | {"ps_per_parameter": took / 5e8 * 1e9}


def added() -> dict[str, Any]:
    """Measure how a bf16 gradient of a weight is added to the fp32 sum, as without APEX."""
    gradient, total = normal(2**29), normal(2**29, dtype="float32")
    return rate(ms(lambda: total.add_(gradient)), 10 * gradient.numel())


def bus() -> dict[str, Any]:
    import torch

    here, host = normal(2**28), torch.empty(2**28, dtype=torch.bfloat16, pin_memory=True)
    size = here.numel() * 2
    down = ms(lambda: host.copy_(here, non_blocking=True))
    up = ms(lambda: here.copy_(host, non_blocking=True))
    return {"GB/s_to_host": size / down / 1e6, "GB/s_to_device": size / up / 1e6}


def host_adam() -> dict[str, Any]:
    """Measure Adam on the host, as megatron-core's offloading takes it, and as it could."""
    import time

    import torch

    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, more in {"as_is": {}, "fused": {"fused": True}}.items():
        weights = [torch.randn(10**7).requires_grad_() for _ in range(5)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-4, **more)
        optimizer.step()
        started = time.perf_counter()
        for _ in range(3):
            optimizer.step()
        found[f"ns_per_parameter_{name}"] = (time.perf_counter() - started) / 3 / 5e7 * 1e9
    return found
