"""Linear, LayerNormLinear and GroupedLinear: parameters, tensor-parallel communication and checkpoint keys as in TE."""

import torch
from torch import nn

from transformer_engine.pytorch.norm import normalize


def _divide(width: int, ranks: int) -> int:
    if width % ranks:
        raise ValueError(f"{width} is not divisible by {ranks}")
    return width // ranks


def _product(x, weight, bias):
    """Product with a weight, or with a DistributedWeight of Transformer Engine, which provides its values."""
    if getattr(weight, "is_distributed_weight", False):
        return _Materialized.apply(x, [x.shape[0]], bias, weight)
    return nn.functional.linear(x, weight, bias)


class _Materialized(torch.autograd.Function):
    """Products of an input's parts with frozen weights, which are fetched in each direction and not kept between."""

    @staticmethod
    def forward(ctx, x, sizes, bias, *weights):
        ctx.sizes = sizes
        ctx.save_for_backward(*weights)
        real = _list(weights[0].materialize_group_for_forward())
        return torch.cat(
            [nn.functional.linear(part, one, bias) for part, one in zip(x.split(sizes), real, strict=True)]
        )

    @staticmethod
    def backward(ctx, grad):
        weights = ctx.saved_tensors
        real = _list(weights[0].materialize_group_for_backward())
        parts = [part @ one for part, one in zip(grad.split(ctx.sizes), real, strict=True)]
        return torch.cat(parts), None, None, *(None for _ in weights)


def _list(found):
    return found if isinstance(found, list | tuple) else [found]


class _Base(nn.Module):
    """Base of the three modules: initialisation under Megatron's random-state tracker, and an empty FP8 state."""

    fp8 = False
    fp8_calibration = False
    save_original_input = False

    def __init__(
        self,
        init_method=None,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device=None,
        **_,
    ):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}
        self._init_method, self._tracker, self._tracker_name = init_method, get_rng_state_tracker, rng_tracker_name
        self._make = {"dtype": params_dtype, "device": device}

    def _new_weight(self, out_features: int, in_features: int, dim: int, parallel: bool) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(out_features, in_features, **self._make))
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = parallel, dim, 1
        self._initialize(weight)
        return weight

    @torch.no_grad()
    def _initialize(self, weight) -> None:
        if weight.is_meta or self._init_method is None:
            return
        if self._tracker is None:
            self._init_method(weight)
            return
        names = [self._tracker_name] if self._tracker_name else []
        with self._tracker().fork(*names):
            self._init_method(weight)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **making,
    ):
        super().__init__(**making)
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1 and parallel_mode is not None
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.in_features = _divide(in_features, tp_size) if parallel_mode == "row" else in_features
        self.out_features = _divide(out_features, tp_size) if parallel_mode == "column" else out_features
        self._make_parameters()

    def _make_parameters(self) -> None:
        parallel = self.tp_size > 1 and self.parallel_mode is not None
        self.weight = self._new_weight(
            self.out_features, self.in_features, 1 if self.parallel_mode == "row" else 0, parallel
        )
        self.bias = None
        if self.use_bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, **self._make))
            if self.parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif parallel:
                self.bias.tensor_model_parallel, self.bias.partition_dim, self.bias.partition_stride = True, 0, 1

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        apply_bias = self.bias if self.use_bias and not self.return_bias else None
        if self.tp_size > 1 and self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
            out = _product(x, self.weight, apply_bias)
        elif self.tp_size > 1 and self.parallel_mode == "row":
            out = _product(x, self.weight, None)
            if self.sequence_parallel:
                out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
            else:
                out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
            out = out if apply_bias is None else out + apply_bias
        else:
            out = _product(x, self.weight, apply_bias)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **kwargs,
    ):
        self._norm = {"kind": normalization, "zero_centered_gamma": zero_centered_gamma}
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        # Megatron-Bridge's LoRA sets these on the wrapped layer, to give the adapter the normalised input.
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered

    def _make_parameters(self) -> None:
        fill = torch.zeros if self._norm["zero_centered_gamma"] else torch.ones
        self.layer_norm_weight = nn.Parameter(fill(self.in_features, **self._make))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if self._norm["kind"] == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(self.in_features, **self._make))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        super()._make_parameters()

    def forward(self, x, is_first_microbatch=None):
        normed = normalize(x, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps, **self._norm)
        out = super().forward(normed)
        if not self.return_layernorm_output:
            return out
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            normed = _GatherWithoutGradient.apply(normed, self.tp_group)
        return (*out, normed) if self.return_bias else (out, normed)


class _GatherWithoutGradient(torch.autograd.Function):
    """Gather that ignores the gradient of a norm's output that was returned gathered, as in TE since 2.4."""

    @staticmethod
    def forward(ctx, x, group):
        parts = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return None, None


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **making,
    ):
        super().__init__(**making)
        assert tp_size == 1, "Megatron's dispatcher does the communication of tensor-parallel experts"
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel = False
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        for i in range(num_gemms):
            setattr(self, f"weight{i}", self._new_weight(out_features, in_features, 0, False))
            if bias:
                setattr(self, f"bias{i}", nn.Parameter(torch.zeros(out_features, **self._make)))

    def forward(self, x, m_splits, is_first_microbatch=None):
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        if getattr(weights[0], "is_distributed_weight", False):
            out = _Materialized.apply(x, sizes, None, *weights)
            if self.use_bias and not self.return_bias:
                out = out + torch.cat([bias.expand(size, -1) for bias, size in zip(biases, sizes, strict=True)])
            return (out, biases) if self.return_bias else out
        # Experts without tokens take part too: like the grouped kernel, this gives every expert a gradient.
        chunks = [
            nn.functional.linear(part, weights[i], None if self.return_bias else biases[i])
            for i, part in enumerate(torch.split(x, sizes))
        ]
        out = torch.cat(chunks)
        return (out, biases) if self.return_bias else out
