"""A run's model as one rank would hold it, without memory and without the other ranks; and Megatron's verdict on it.

The process group is torch's fake one, where a collective does nothing. The device is meta, where a tensor has a shape
and no memory. Everything else is as in training: Bridge's provider, the checks of Megatron-core and Megatron-Bridge,
the adapters; then a step is begun and left before its first product, for the checks that Megatron leaves until then.
"""

import contextlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from conf.facts import facts_from_hf
from conf.schema import Run
from trainer import platform
from trainer.faults import Fault

REFUSALS = (ValueError, AssertionError, RuntimeError, NotImplementedError, AttributeError, ArithmeticError)

# Gradients are summed over dp * cp, or over edp. Where both are the same ranks, Megatron counts all as the first.
TRAINED = ("trained_dense", "trained_experts")


class Refused(Exception):
    """Megatron's own words, on one line."""


def prepare() -> None:
    """Import Megatron, once in a process."""
    os.environ.setdefault("RANK", "0")
    platform.start()
    warnings.filterwarnings("ignore", "ModelProviderMixin-based")  # no user can migrate it

    logging.getLogger("megatron").setLevel(logging.ERROR)


def count(run: Run, config: dict[str, Any], rank: int) -> Counter[str]:
    """Parameters of one rank, by the kinds of conf/plan/parameters.py, and those of TRAINED. Raises Refused."""
    with _megatrons_words(), _world(run, rank), _on_meta(), contextlib.redirect_stdout(None):
        chunks = _build(run, config)
        _step_off(run, chunks)
        found: Counter[str] = Counter()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                found[kind_of(name.removeprefix("module."))] += parameter.numel()
                if parameter.requires_grad:
                    found[TRAINED[0 if getattr(parameter, "allreduce", True) else 1]] += parameter.numel()
        return found


def kind_of(name: str) -> str:
    """Of a parameter, by Megatron's name."""
    routed = ".experts." in name
    if ".adapter." in name:
        return "adapters_experts" if routed else "adapters_dense"
    if name.startswith("mtp.") and ".mtp_model_layer." not in name:
        return "mtp"
    if "layernorm" in name or "layer_norm" in name:
        return "norms"
    parts = {"embedding.": "embedding", "output_layer.": "output", ".self_attention.": "attention"}
    parts |= {".shared_experts.": "shared_experts", ".router.": "router", ".experts.": "experts", ".mlp.": "mlp"}
    return next(kind for part, kind in parts.items() if part in name)


@contextlib.contextmanager
def _megatrons_words() -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        if isinstance(error, Fault):
            raise
        raise Refused(" ".join(str(error).split()) or repr(error)) from error


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
    """Whoever asks for the current device is told meta. Values, of which there are none, are neither drawn nor sent."""
    import torch
    from megatron.bridge.peft.utils import ParallelLinearAdapter

    from trainer import adapters

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("meta")),
        mock.patch.object(ParallelLinearAdapter, "_synchronize_shared_expert_parameters"),
        mock.patch.object(adapters, "draw_initial_values"),
        contextlib.nullcontext() if platform.has_gpu() else _as_strict_as_te(),
    ):
        yield


def _as_strict_as_te():
    """The stand-in for Transformer Engine rounds where that refuses to cut a layer."""
    from megatron.core.tensor_parallel.utils import divide
    from transformer_engine.pytorch.linear import Linear

    make = Linear.__init__

    def strict(self, in_features, out_features, *args, tp_size=1, parallel_mode=None, **kwargs):
        if parallel_mode:
            divide(in_features if parallel_mode == "row" else out_features, tp_size)
        make(self, in_features, out_features, *args, tp_size=tp_size, parallel_mode=parallel_mode, **kwargs)

    return mock.patch.object(Linear, "__init__", strict)


def _build(run: Run, config: dict[str, Any]) -> list:
    """The stages of this rank, validated as before training."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    from trainer.model import make_provider
    from trainer.recipe import make_adapter

    # Bridge turns sequence parallelism off where tp is 1; core refuses it.
    ModelParallelConfig(tensor_model_parallel_size=run.layout.tp, sequence_parallel=run.layout.sp)
    provider = make_provider(run, open_bridge(config))
    provider.perform_initialization, provider.init_model_with_meta_device = False, True
    _container(run, provider).validate()
    provider.initialize_model_parallel(seed=run.train.seed, create_gloo_process_groups=False)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, init_model_with_meta_device=True)
    adapter = make_adapter(run)
    return adapter(chunks) if adapter else chunks


def open_bridge(config: dict[str, Any]):
    architecture = config["architectures"][0]
    from trainer import lazy_bridge, unbridged

    if architecture in unbridged.FAMILIES:
        return unbridged.Unbridged(facts_from_hf(config))
    lazy_bridge.load_family(architecture)
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from transformers import AutoConfig

    return AutoBridge.from_hf_config(AutoConfig.for_model(**config))


def _container(run: Run, provider):
    """What of trainer/recipe.py bears on validation, without data and checkpoints, which a rehearsal has not."""
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        GPTSFTDatasetConfig,
        LoggerConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainingConfig,
        ValidationConfig,
    )

    train = run.train
    packs = PackedSequenceSpecs(packed_sequence_size=run.data.seq_length) if run.data.packed else None
    return ConfigContainer(
        model=provider,
        train=TrainingConfig(
            train_iters=train.steps, global_batch_size=train.global_batch, micro_batch_size=train.micro_batch
        ),
        validation=ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", lr=run.optimizer.lr, use_distributed_optimizer=True),
        scheduler=SchedulerConfig(lr_decay_iters=train.steps),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, average_in_collective=False),
        dataset=GPTSFTDatasetConfig(
            dataset_root=".",
            seq_length=run.data.seq_length,
            enable_offline_packing=run.data.packed,
            offline_packing_specs=packs,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1),
        logger=LoggerConfig(),
        checkpoint=CheckpointConfig(),
    )


class _Stepping(Exception):
    """The schedule has come to its first forward step."""


def _step_off(run: Run, chunks: list) -> None:
    """What Megatron only checks in a step, up to the first product."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.moe_layer import MoELayer

    train, dp = run.train, parallel_state.get_data_parallel_world_size()
    microbatches = ConstantNumMicroBatchesCalculator(train.global_batch, train.micro_batch, dp, False, 1).get()
    if run.layout.sp:  # as the embedding cuts its output
        tokens = torch.empty(run.data.seq_length // run.layout.cp, 1, 1, device="meta")
        mappings.reduce_scatter_to_sequence_parallel_region(tokens)
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        with mock.patch.object(layer, "route", side_effect=_Stepping), contextlib.suppress(_Stepping):
            layer.train()(torch.empty(1, 1, layer.config.hidden_size, device="meta"))
        break
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
