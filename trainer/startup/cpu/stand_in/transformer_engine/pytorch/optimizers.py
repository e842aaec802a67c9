"""FusedAdam and FusedSGD with the state layout of the CUDA ones: moments per parameter, the step in the group.

The multi-tensor kernels are missing on purpose: Megatron then uses its own plain functions.
"""

import torch
from torch.optim import SGD as FusedSGD  # noqa: F401


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        **_,
    ):
        if master_weights or (exp_avg_dtype, exp_avg_sq_dtype) != (torch.float32, torch.float32):
            raise ValueError("the precision-aware optimizer needs a GPU")
        group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, group)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correct1, correct2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = (state["exp_avg"] / correct1) / ((state["exp_avg_sq"] / correct2).sqrt() + group["eps"])
                p.sub_(update.add(p, alpha=group["weight_decay"]), alpha=group["lr"])
