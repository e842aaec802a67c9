"""Norm of each layer's gradient, and the gradient noise scale, if section log requests them.

    grad_norm_layer_N, grad_norm_others     before clipping; others = embeddings, head, last norm, MTP
    noise_scale_tokens                      McCandlish et al. 2018, appendix A.1; smoothed over steps. Batches with far
                                            fewer tokens benefit from more tokens; batches with far more do not

The noise scale compares the gradient of a rank's first micro batch with that of the whole batch. Both are computed only
at steps that have a line of metrics.
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

DECAY = 0.9  # of the moving means of both estimates; the quotient of single estimates would jump


class Gradients:
    """Metrics of gradients, taken at the end of a step before the gradients are cleared."""

    def __init__(self, run: Run):
        self.layers, self.noise = run.log.layer_norms, run.log.noise_scale
        self.squared = self.trace = 0.0  # means of the gradient's square and of its variance over tokens
        self.begin_step(False)

    def begin_step(self, logged: bool) -> None:
        """Begin a step; `logged` says whether its metrics will be written."""
        self.logged = logged
        self.tokens: list[torch.Tensor] = []
        self.passes = 0
        self.first: torch.Tensor | None = None  # square of the first micro batch's gradient, summed over its tokens

    def watch(self, forward_step: Callable) -> Callable:
        """Return the forward_step, wrapped to observe gradients if the noise scale is requested."""
        if not self.noise:
            return forward_step

        @functools.wraps(forward_step)
        def watched(state: Any, iterator: Any, model: Any, *args: Any, **keys: Any) -> Any:
            if not self.logged or not torch.is_grad_enabled():
                return forward_step(state, iterator, model, *args, **keys)
            self.passes += 1
            if self.passes == 2:
                self.first = _square(model)
            output, loss = forward_step(state, iterator, model, *args, **keys)
            return output, self._counting(loss)

        return watched

    def _counting(self, loss: Callable) -> Callable:
        def counting(*args: Any, **keys: Any) -> Any:
            result = loss(*args, **keys)
            self.tokens.append(result[1].detach().double())
            return result

        return counting

    def numbers(self, context) -> dict[str, float]:
        """Metrics of this step. Collective: every rank must call it."""
        if context.skipped_iter or context.grad_norm is None:
            return {}
        return (layer_norms(context) if self.layers else {}) | self._noise_scale(float(context.grad_norm))

    def _noise_scale(self, grad_norm: float) -> dict[str, float]:
        """The noise scale, from the gradients of one micro batch and of the whole batch."""
        if self.first is None:
            return {}
        small = self.first / self.tokens[0] ** 2
        sums = torch.stack([small, self.tokens[0], torch.stack(self.tokens).sum()])
        distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        ranks = parallel_state.get_data_parallel_world_size()
        square, few, many = sums.tolist()
        squared, trace = gradient_signal.estimates(square / ranks, grad_norm**2, few / ranks, many)
        self.squared = DECAY * self.squared + (1 - DECAY) * squared
        self.trace = DECAY * self.trace + (1 - DECAY) * trace
        return {"noise_scale_tokens": self.trace / self.squared} if self.squared > 0 else {}


def layer_norms(context) -> dict[str, float]:
    """Norm of the gradient of each layer, from the gradients that the optimizers of all ranks have used."""
    count = context.state.cfg.model.num_layers
    numbers = _layer_numbers(context.model)
    total = torch.zeros(count + 1, dtype=torch.float64, device="cuda")
    for optimizer in getattr(context.optimizer, "chained_optimizers", [context.optimizer]):
        squares = torch.zeros_like(total)
        for parameter, main in stepped(optimizer):
            for grad in optimizer._filter_grads_for_norm([main]):
                squares[numbers.get(id(parameter), 0)] += grad.float().norm() ** 2
        distributed.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
        total += squares
    clip = context.state.cfg.optimizer.clip_grad
    clipped = min(1.0, clip / (float(context.grad_norm) + 1e-6)) if clip else 1.0  # as core clips, in place
    norms = (total.sqrt() / clipped).tolist()
    layers = {f"grad_norm_layer_{number}": norm for number, norm in enumerate(norms[1:], 1)}
    return layers | {"grad_norm_others": norms[0]}


def cosine_with_mean(optimizer: Any, beta: float) -> float:
    """Cosine of the step's gradient and Adam's mean before the step. Collective: every rank must call it."""
    total = torch.zeros(3, dtype=torch.float64, device="cuda")
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        sums = torch.zeros_like(total)
        for _, main in stepped(part):
            for grad in part._filter_grads_for_norm([main]):
                sums += gradient_signal.products(grad.float(), part.optimizer.state[main]["exp_avg"], beta)
        distributed.all_reduce(sums, group=part.get_grad_stats_parallel_group())
        total += sums
    return gradient_signal.cosine_of(total)


def _layer_numbers(chunks: list[Any]) -> dict[int, int]:
    """Layer number (from 1) of each parameter, by the parameter's id()."""
    numbers = {}
    for chunk in unwrap_model(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, TransformerLayer) and not name.startswith("mtp"):
                numbers |= {id(parameter): module.layer_number for parameter in module.parameters()}
    return numbers


def stepped(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a model parameter and the main copy that one of Megatron-core's optimizers updates for it."""
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
    for group, copies in zip(models, stepped, strict=True):
        yield from zip(group, copies, strict=True)


def _square(model: Any) -> torch.Tensor:
    """Squared norm of the gradients accumulated so far on this rank; shared parameters count once."""
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    group, config = parallel_state.get_tensor_model_parallel_group(), unwrap_model(model).config
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.main_grad.float()
        if group.size() > 1 and _is_summed_late(name, parameter, config):
            grad = grad.clone()
            distributed.all_reduce(grad, group=group)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            total += grad.norm() ** 2
    distributed.all_reduce(total, group=group)
    return total


def _is_summed_late(name: str, parameter: Any, config: Any) -> bool:
    """Whether each tensor-parallel rank has a partial gradient, which Megatron-core sums at the end of the step.

    megatron/core/distributed/finalize_model_grads.py has the same condition.
    """
    of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return of_heads or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
