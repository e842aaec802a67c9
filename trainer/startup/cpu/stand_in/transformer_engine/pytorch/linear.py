"""Linear, LayerNormLinear and GroupedLinear: parameters, tensor-parallel communication and checkpoint keys as in TE."""

import torch
from torch import nn

from transformer_engine.pytorch.norm import WithoutFP8, normalize, set_norm


def _divide(width: int, ranks: int) -> int:
    if width % ranks:
        raise ValueError(f"{width} is not divisible by {ranks}")
    return width // ranks


def _product(x, sizes, weights, biases):
    """Products of the input's parts, one after another, with weights of TE.

    A DistributedWeight provides its values for each product. Parts without rows take part too: like the grouped kernel,
    this gives the weight of every expert a gradient.
    """
    if getattr(weights[0], "is_distributed_weight", False):
        return _Materialized.apply(x, sizes, biases, *weights)
    if len(weights) == 1:
        return nn.functional.linear(x, weights[0], biases[0])
    parts = zip(x.split(sizes), weights, biases, strict=True)
    return torch.cat([nn.functional.linear(part, weight, bias) for part, weight, bias in parts])


class _Materialized(torch.autograd.Function):
    """Products of an input's parts with frozen weights, which are fetched in each direction and not kept between."""

    @staticmethod
    def forward(ctx, x, sizes, biases, *weights):
        ctx.sizes = sizes
        ctx.save_for_backward(*weights)
        return _product(x, sizes, weights[0].materialize_group_for_forward(), biases)

    @staticmethod
    def backward(ctx, grad):
        weights = ctx.saved_tensors
        real = weights[0].materialize_group_for_backward()
        parts = [part @ weight for part, weight in zip(grad.split(ctx.sizes), real, strict=True)]
        return torch.cat(parts), None, None, *(None for _ in weights)


class _Base(WithoutFP8):
    """Base of the three modules: sizes of a rank's part, and initialisation under Megatron's random-state tracker."""

    fp8 = fp8_calibration = save_original_input = False

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
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1 and parallel_mode is not None
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.in_features = _divide(in_features, tp_size) if parallel_mode == "row" else in_features
        self.out_features = _divide(out_features, tp_size) if parallel_mode == "column" else out_features
        self._make_parameters()

    def _new_weight(self) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **self._make))
        weight.tensor_model_parallel = self.tp_size > 1 and self.parallel_mode is not None
        weight.partition_dim, weight.partition_stride = 1 if self.parallel_mode == "row" else 0, 1
        self._initialize(weight)
        return weight

    def _new_bias(self) -> nn.Parameter | None:
        return nn.Parameter(torch.zeros(self.out_features, **self._make)) if self.use_bias else None

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

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class Linear(_Base):
    def _make_parameters(self) -> None:
        self.weight, self.bias = self._new_weight(), self._new_bias()
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.weight.tensor_model_parallel:
            self.bias.tensor_model_parallel, self.bias.partition_dim, self.bias.partition_stride = True, 0, 1

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        bias = None if self.return_bias else self.bias
        cut = self.parallel_mode if self.tp_size > 1 else None
        if cut == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif cut == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        out = _product(x, [x.shape[0]], [self.weight], [None if cut == "row" else bias])
        if cut == "row" and self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif cut == "row":
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if cut == "row" and bias is not None:
            out = out + bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        *sizes: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **kwargs,
    ):
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        super().__init__(*sizes, **kwargs)
        # Megatron-Bridge's LoRA sets these on the wrapped layer, to give the adapter the normalised input.
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered

    def _make_parameters(self) -> None:
        set_norm(self, "layer_norm_", self.normalization, self.in_features, **self._make)
        super()._make_parameters()

    def forward(self, x, is_first_microbatch=None):
        normed = normalize(self, "layer_norm_", x)
        out = super().forward(normed)
        if not self.return_layernorm_output:
            return out
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            from megatron.core.tensor_parallel import mappings

            # TE has ignored the gradient of this output since 2.4.
            normed = mappings.gather_from_sequence_parallel_region(normed.detach(), group=self.tp_group)
        return (*out, normed) if self.return_bias else (out, normed)


class GroupedLinear(_Base):
    def __init__(self, num_gemms: int, *sizes: int, tp_size: int = 1, **kwargs):
        assert tp_size == 1, "Megatron's dispatcher does the communication of tensor-parallel experts"
        self.num_gemms = num_gemms
        super().__init__(*sizes, **kwargs)

    def _make_parameters(self) -> None:
        for i in range(self.num_gemms):
            setattr(self, f"weight{i}", self._new_weight())
            if self.use_bias:
                setattr(self, f"bias{i}", self._new_bias())

    def forward(self, x, m_splits, is_first_microbatch=None):
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
        out = _product(x, sizes, weights, [None] * self.num_gemms if self.return_bias else biases)
        return (out, biases) if self.return_bias else out
