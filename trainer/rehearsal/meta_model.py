"""The model of one rank of a run, without memory and without the other ranks, and Megatron's checks of it.

The process group is torch's fake one, whose collectives do nothing. The device is meta, on which tensors have a shape
but no memory. Everything else is as in training: the recipe, the checks of Megatron-core and Megatron-Bridge, the
adapters, the buffers of gradients, the optimizer and its states. Then a step is begun and abandoned before its first
product, for the checks that Megatron makes only there.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import contextlib
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conf import families
from conf.rules import schedule
from conf.schema.run import Run
from contract.faults import Fault
from trainer.startup import device

REFUSALS = (ValueError, AssertionError, RuntimeError, NotImplementedError, AttributeError, ArithmeticError)

# Gradients are summed over dp * cp, or over edp. If both are the same ranks, Megatron counts all as dense.
TRAINED = ("trained_dense", "trained_experts")
# Bytes of gradients and of the optimizer; and the number of padding elements in the gradients' buffers: parameters
# begin at multiples of 64, and buffers end at a multiple of lcm(copies, 128).
STATES = ("gradients", "optimizer")
PADDING = "padding"


class Refused(Exception):
    """Refusal by Megatron, with its message on one line."""


def prepare() -> None:
    """Import Megatron, once per process."""
    os.environ.setdefault("RANK", "0")
    device.start()
    warnings.filterwarnings("ignore", "ModelProviderMixin-based")  # no user can migrate it

    logging.getLogger("megatron").setLevel(logging.ERROR)


def count(run: Run, config: dict[str, Any], rank: int) -> Counter[str]:
    """Count the parameters of one rank by the kinds of conf/planner/parameters.py, those of TRAINED, and STATES.

    Raise Refused if Megatron refuses the layout.
    """
    try:
        with _world(run, rank), _on_meta(), contextlib.redirect_stdout(None):
            chunks, optimizer = _build(run, config)
            _step_off(run, chunks)
            counts = _states(chunks, optimizer)
    except Fault:
        raise
    except REFUSALS as error:
        raise Refused(" ".join(str(error).split()) or repr(error)) from error
    for name, parameter in chain.from_iterable(chunk.named_parameters() for chunk in chunks):
        counts[kind_of(re.sub(r"^(module\.)+", "", name))] += parameter.numel()
        if parameter.requires_grad:
            counts[TRAINED[0 if getattr(parameter, "allreduce", True) else 1]] += parameter.numel()
    return counts


def _states(chunks: list, optimizer) -> Counter[str]:
    counts: Counter[str] = Counter()
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in buffers:
        numbers = sum(parameter.numel() for parameter in buffer.params)
        counts["gradients"] += numbers * buffer.grad_data.itemsize
        counts[PADDING] += buffer.numel - numbers
    weights = {parameter.untyped_storage()._cdata for chunk in chunks for parameter in chunk.parameters()}
    for member in optimizer.chained_optimizers:
        if not member.optimizer:  # this rank trains nothing
            continue
        member.init_state_fn(member.optimizer, member.config)
        mains = [parameter for group in member.optimizer.param_groups for parameter in group["params"]]
        moments = [tensor for state in member.optimizer.state.values() for tensor in state.values()]
        optimizer_tensors = (tensor for tensor in mains + moments if tensor.untyped_storage()._cdata not in weights)
        counts["optimizer"] += sum(tensor.nbytes for tensor in optimizer_tensors)
    return counts


def kind_of(name: str) -> str:
    """Return the kind of a parameter, by Megatron's name."""
    routed = ".experts." in name
    if ".adapter." in name:
        return "adapters_experts" if routed else "adapters_dense"
    if name.startswith("mtp.") and ".mtp_model_layer." not in name:
        return "mtp"
    if "layernorm" in name or "layer_norm" in name:
        return "norms"
    parts = {"embedding.": "embedding", "output_layer.": "output", ".self_attention.": "attention"}
    parts |= {".shared_experts.": "shared_experts", "_latent_proj.": "shared_experts", ".router.": "router"}
    parts |= {".experts.": "experts", ".mlp.": "mlp"}
    return next(kind for part, kind in parts.items() if part in name)


@contextlib.contextmanager
def _world(run: Run, rank: int) -> Iterator[None]:
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Make meta the current device while the block runs. Values do not exist there, so they are neither drawn nor sent.

    Without a GPU, Megatron's queries about a GPU, and about packages installed only with one, are answered as if a GPU
    existed.
    """
    import torch
    from megatron.bridge.peft.utils import ParallelLinearAdapter
    from megatron.core.transformer.moe import token_dispatcher

    from trainer.megatron import adapters

    patches = [
        mock.patch.dict(os.environ),  # Megatron stores the kind of attention there, and refuses another
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("meta")),
        mock.patch.object(ParallelLinearAdapter, "_synchronize_shared_expert_parameters"),
        mock.patch.object(adapters, "draw_initial_values"),
        _types_of_a_gpu(),
    ]
    if not device.has_gpu():
        gpu = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)
        patches.append(mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu))
        patches.append(
            mock.patch.multiple(token_dispatcher, fused_dispatch=mock.DEFAULT, set_deepep_num_sms=mock.DEFAULT)
        )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _types_of_a_gpu():
    """Give tensors the type names of a GPU: Megatron's optimizers sort tensors by these names, and know no others."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            named = func is torch.Tensor.type and isinstance(result, str)
            return result.replace("torch.meta.", "torch.cuda.").replace("cuda.meta", "cuda") if named else result

    return Names()


def _build(run: Run, config: dict[str, Any]) -> tuple[list, Any]:
    """Build the stages of this rank and their optimizer, validated and assembled like by Bridge before training."""
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.core.model_parallel_config import ModelParallelConfig

    from trainer.megatron import sequences
    from trainer.megatron.recipe import make_config

    # Bridge turns sequence parallelism off if tp is 1; core refuses it.
    ModelParallelConfig(tensor_model_parallel_size=run.layout.tp, sequence_parallel=run.layout.sp)
    bridge, stands_in = open_bridge(config), not device.has_gpu()
    with (
        mock.patch.object(sequences, "make_dataset", _no_data),
        mock.patch.object(device, "has_gpu", return_value=True),
    ):
        whole = make_config(schedule.of_steps(run, run.train.steps or 1), bridge, None)
    provider = whole.model
    if stands_in:  # Transformer Engine itself must have these kernels
        provider.apply_rope_fusion = provider.moe_permute_fusion = provider.moe_router_fusion = False
        provider.gradient_accumulation_fusion = False
    without_checkpoint(run, whole)
    provider.perform_initialization, provider.init_model_with_meta_device = False, True
    runtime_config_update(whole)
    provider.initialize_model_parallel(seed=run.train.seed, create_gloo_process_groups=False)
    chunks = provider.provide_distributed_model(ddp_config=whole.ddp, init_model_with_meta_device=True)
    return chunks, setup_optimizer(whole.optimizer, whole.scheduler, chunks)[0]


def without_checkpoint(run: Run, container) -> None:
    """Let Bridge build the model and its adapter without a checkpoint, which its own adapter setup requires."""
    from trainer.megatron.recipe import make_adapter

    checkpoint = container.checkpoint
    checkpoint.pretrained_checkpoint = checkpoint.save = checkpoint.save_interval = container.peft = None
    if adapter := make_adapter(run):
        container.model.register_pre_wrap_hook(lambda chunks: adapter(chunks, training=True))


def open_bridge(config: dict[str, Any]):
    from trainer.megatron import bridges

    bridges.load(config)
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from transformers import AutoConfig

    return AutoBridge.from_hf_config(AutoConfig.for_model(**families.as_text(config)))


def _no_data(run: Run):
    """Return data settings that pass Megatron's validation; a rehearsal has no files."""
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.training.config import GPTSFTDatasetConfig

    packs = PackedSequenceSpecs(packed_sequence_size=run.data.seq_length) if run.data.packed else None
    return GPTSFTDatasetConfig(
        dataset_root=".",
        seq_length=run.data.seq_length,
        enable_offline_packing=run.data.packed,
        offline_packing_specs=packs,
    )


class _Stepping(Exception):
    """Signal that the schedule has reached its first forward step."""


def _step_off(run: Run, chunks: list) -> None:
    """Begin a step, up to the first product, for the checks that Megatron makes only there."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    train, dp = run.train, parallel_state.get_data_parallel_world_size()
    microbatches = ConstantNumMicroBatchesCalculator(train.global_batch, train.micro_batch, dp, False, 1).get()
    if run.layout.sp:  # as the embedding cuts its output
        tokens = torch.empty(run.data.seq_length // run.layout.cp, 1, 1, device="meta")
        mappings.reduce_scatter_to_sequence_parallel_region(tokens)
    modules = [module for chunk in chunks for module in chunk.modules()]
    for layer in (module for module in modules if isinstance(module, MoELayer)):
        with mock.patch.object(layer, "route", side_effect=_Stepping), contextlib.suppress(_Stepping):
            layer.train()(torch.empty(1, 1, layer.config.hidden_size, device="meta"))
        break
    for layer in (module for module in modules if isinstance(module, MultiTokenPredictionLayer)):
        with mock.patch.object(tensor_parallel, "checkpoint", side_effect=_Stepping), contextlib.suppress(_Stepping):
            if train.recompute == "full":
                layer._checkpointed_forward(None, None)
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True) and run.layout.vpp:
        with contextlib.suppress(_Stepping):
            get_forward_backward_func()(
                forward_step_func=mock.Mock(side_effect=_Stepping),
                data_iterator=[None] * len(chunks),
                model=chunks,
                num_microbatches=microbatches,
                seq_length=run.data.seq_length,
                micro_batch_size=train.micro_batch,
            )
