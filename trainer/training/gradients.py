"""Norm of each layer's gradient, and the gradient noise scale, where a run asks for them (section log).

    grad_norm_layer_N, grad_norm_others     before clipping; others = embeddings, head, last norm, MTP
    noise_scale_tokens                      McCandlish et al. 2018, appendix A.1: batches of far fewer tokens gain from
                                            more, batches of far more gain nothing; smoothed over steps

The noise scale compares the gradient of a rank's first micro batch with that of the whole batch. Both are asked for at
steps that have a line of metrics.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateUsage=false

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import distributed

from conf.schema.run import Run
from trainer.training import gradient_signal
from trainer.training.noise_estimates import estimates

KEPT = 0.9  # of the means of both estimates, whose quotient alone would jump


class Gradients:
    """Numbers on gradients, at the end of a step, before they are cleared."""

    def __init__(self, run: Run):
        self.layers = run.log.layer_norms
        self.noise = NoiseScale() if run.log.noise_scale else None

    def watch(self, forward_step: Callable) -> Callable:
        """The forward_step, looked at where the noise scale is asked for."""
        return self.noise.watch(forward_step) if self.noise else forward_step

    def begin_step(self, asked: bool) -> None:
        """Begin a step, whose numbers will be asked for or not."""
        if self.noise:
            self.noise.begin_step(asked)

    def numbers(self, context) -> dict[str, float]:
        """Numbers of this step. Every rank takes part."""
        if context.skipped_iter or context.grad_norm is None:
            return {}
        found = layer_norms(context) if self.layers else {}
        return found | (self.noise.numbers(float(context.grad_norm)) if self.noise else {})


def layer_norms(context) -> dict[str, float]:
    """Norm of the gradient of each layer, from what the optimizers of all ranks have stepped on."""
    count = context.state.cfg.model.num_layers
    numbers = _layer_numbers(context.model)
    total = torch.zeros(count + 1, dtype=torch.float64, device="cuda")
    for one in getattr(context.optimizer, "chained_optimizers", [context.optimizer]):
        squares = torch.zeros_like(total)
        for parameter, main in stepped(one):
            for grad in one._filter_grads_for_norm([main]):
                squares[numbers.get(id(parameter), 0)] += grad.float().norm() ** 2
        distributed.all_reduce(squares, group=one.get_grad_stats_parallel_group())
        total += squares
    clip = context.state.cfg.optimizer.clip_grad
    clipped = min(1.0, clip / (float(context.grad_norm) + 1e-6)) if clip else 1.0  # as core clips, in place
    norms = (total.sqrt() / clipped).tolist()
    layers = {f"grad_norm_layer_{number}": norm for number, norm in enumerate(norms[1:], 1)}
    return layers | {"grad_norm_others": norms[0]}


def cosine_with_mean(optimizer: Any, beta: float) -> float:
    """Cosine of the gradient that was stepped on and Adam's mean before it. Every rank takes part."""
    total = torch.zeros(3, dtype=torch.float64, device="cuda")
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        sums = torch.zeros_like(total)
        for _, main in stepped(one):
            for grad in one._filter_grads_for_norm([main]):
                sums += gradient_signal.products(grad.float(), one.optimizer.state[main]["exp_avg"], beta)
        distributed.all_reduce(sums, group=one.get_grad_stats_parallel_group())
        total += sums
    return gradient_signal.cosine_of(total)


def _layer_numbers(chunks: list[Any]) -> dict[int, int]:
    """Number of the layer, from 1 on, that a parameter is of, by the parameter's id."""
    found = {}
    for chunk in unwrap_model(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, TransformerLayer) and not name.startswith("mtp"):
                found |= {id(parameter): module.layer_number for parameter in module.parameters()}
    return found


def stepped(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a parameter of the model and of what one of core's optimizers steps on in its place."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if isinstance(optimizer, DistributedOptimizer):
        halves = optimizer.shard_fp32_from_float16_groups
        if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            halves = optimizer.shard_float16_groups
        yield from _pairs(optimizer.model_float16_groups, halves)
        yield from _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        yield from _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from _pairs(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)
    else:
        parameters = optimizer.get_parameters()
        yield from zip(parameters, parameters, strict=True)


def _pairs(models: Iterable[list[Any]], stepped: Iterable[list[Any]]) -> Iterator[tuple[Any, Any]]:
    for some, others in zip(models, stepped, strict=True):
        yield from zip(some, others, strict=True)


class NoiseScale:
    """Gradient noise scale, from the gradients of one micro batch and of the whole batch."""

    def __init__(self) -> None:
        self.squared = self.trace = 0.0  # means of the gradient's square and of its variance over tokens
        self.begin_step(False)

    def begin_step(self, asked: bool) -> None:
        self.asked = asked
        self.tokens: list[torch.Tensor] = []
        self.passes = 0
        self.first: torch.Tensor | None = None  # square of the first micro batch's gradient, summed over its tokens

    def watch(self, forward_step: Callable) -> Callable:
        @functools.wraps(forward_step)
        def watched(state: Any, iterator: Any, model: Any, *args: Any, **keys: Any) -> Any:
            if not self.asked or not torch.is_grad_enabled():
                return forward_step(state, iterator, model, *args, **keys)
            self.passes += 1
            if self.passes == 2:
                self.first = _square(model)
            output, loss = forward_step(state, iterator, model, *args, **keys)
            return output, self._counting(loss)

        return watched

    def _counting(self, loss: Callable) -> Callable:
        def counting(*args: Any, **keys: Any) -> Any:
            found = loss(*args, **keys)
            self.tokens.append(found[1].detach().double())
            return found

        return counting

    def numbers(self, grad_norm: float) -> dict[str, float]:
        if self.first is None:
            return {}
        small = self.first / self.tokens[0] ** 2
        sums = torch.stack([small, self.tokens[0], torch.stack(self.tokens).sum()])
        distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        ranks = parallel_state.get_data_parallel_world_size()
        squared, trace = estimates(sums[0].item() / ranks, grad_norm**2, sums[1].item() / ranks, sums[2].item())
        self.squared = KEPT * self.squared + (1 - KEPT) * squared
        self.trace = KEPT * self.trace + (1 - KEPT) * trace
        return {"noise_scale_tokens": self.trace / self.squared} if self.squared > 0 else {}


def _square(model: Any) -> torch.Tensor:
    """Square of what gradients are so far on this rank, each parameter once."""
    found = torch.zeros((), dtype=torch.float64, device="cuda")
    group, config = parallel_state.get_tensor_model_parallel_group(), unwrap_model(model).config
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.main_grad.float()
        if group.size() > 1 and _is_summed_late(name, parameter, config):
            grad = grad.clone()
            distributed.all_reduce(grad, group=group)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            found += grad.norm() ** 2
    distributed.all_reduce(found, group=group)
    return found


def _is_summed_late(name: str, parameter: Any, config: Any) -> bool:
    """Whether tensor-parallel ranks have a part each of a gradient, which core adds up when the step is over.

    The same is asked in megatron/core/distributed/finalize_model_grads.py.
    """
    of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return of_heads or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
