"""Megatron-Bridge's description of a run's model, built from the configuration in the same way for every command."""

from pathlib import Path
from typing import Any

from conf import families
from conf.model_files import config_json
from conf.rules import objectives
from conf.schema.run import Run
from contract.faults import Fault
from trainer.megatron import bridges, precision, recorded_layers
from trainer.patches.families import latent_norms
from trainer.startup import device


def load_family(run: Run) -> dict[str, Any]:
    """Import Megatron-Bridge's modules for the family of the released checkpoint. Return its config.json."""
    config = config_json.read(Path(run.paths.model) / config_json.NAME)
    bridges.load(config)
    return config


def open_bridge(run: Run):
    """Open Megatron-Bridge's converter for the released checkpoint in run.paths.model."""
    config = load_family(run)
    return open_folder(Path(run.paths.model), config, trusted(run, config))


def open_folder(folder: Path, config: dict[str, Any], trust: bool = False):
    """Open Megatron-Bridge's converter for the config.json of a folder."""
    bridges.load(config)
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    try:
        return AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=trust)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # any type: only the folder's config.json is read, and its code if trusted
        raise Fault(f"{folder / config_json.NAME}: transformers rejects it: {_cause(error)}") from error


def trusted(run: Run, config: dict[str, Any]) -> bool:
    """Whether to run the release's own code: if it is trusted, and transformers does not have the model itself."""
    return run.model.trust_remote_code and not families.of(config).read_as


def _cause(error: BaseException) -> str:
    """Return the root cause as one line. Bridge treats every error as a network error and raises its own."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(str(error).split())[:300] or type(error).__name__


def make_provider(run: Run, bridge, load_weights: bool = False):
    """Return the model provider of this run, with its layout and precision."""
    from megatron.core.transformer.enums import AttnBackend

    provider = bridge.to_megatron_provider(load_weights=load_weights)
    layout, train, moe = run.layout, run.train, run.moe
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.virtual_pipeline_model_parallel_size = layout.vpp
    # Interleaved stages on two ranks send to the same peer in both directions. Batched sends are then matched in the
    # wrong order, and the loss is silently wrong. Separate sends, which overlap with computation, keep their order.
    provider.overlap_p2p_comm = layout.vpp is not None
    provider.batch_p2p_comm = not provider.overlap_p2p_comm
    provider.context_parallel_size = layout.cp
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.etp
    provider.sequence_parallel = layout.sp
    if train.overlap_tp and device.has_gpu():
        provider.tp_comm_overlap, provider.tp_comm_bootstrap_backend = True, "nccl"
    provider.num_layers_in_first_pipeline_stage = layout.first_stage_layers
    provider.num_layers_in_last_pipeline_stage = layout.last_stage_layers

    dtype = precision.dtype(train.precision)
    provider.bf16, provider.fp16 = train.precision == "bf16", train.precision == "fp16"
    provider.params_dtype = provider.autocast_dtype = provider.pipeline_dtype = dtype
    # cuDNN has no fp32. For some families Megatron-Bridge demands flash-attn, which is not installed.
    provider.attention_backend = AttnBackend.unfused if train.precision == "fp32" else AttnBackend.auto

    provider.seq_length = run.data.seq_length
    # Every sequence is padded or packed to seq_length. Pipeline stages do not expect two sequences per row.
    provider.variable_seq_lengths = layout.pp > 1 and objectives.sequences(train) > 1
    provider.moe_token_dispatcher_type = moe.dispatcher  # core also reads it for a dense model
    # Mean over tokens, not over the means of ranks: the loss does not depend on the layout.
    provider.calculate_per_token_loss = True
    provider.perform_initialization = not load_weights

    provider.mtp_num_layers = (provider.mtp_num_layers if run.model.mtp else None) or None  # Megatron tests for None
    if provider.mtp_num_layers:
        # Only for the next token: with dpo, MTP heads would learn the rejected answers too.
        from trainer.patches.gradients import mtp_loss

        mtp_loss.install()
        provider.mtp_loss_scaling_factor = run.model.mtp_loss_scale if objectives.of(run).next_token else 0.0

    if provider.multi_latent_attention:
        latent_norms.keep_epsilon(provider)
    if provider.num_moe_experts:
        from trainer.megatron.routers import balance
        from trainer.patches import kept_routes

        kept_routes.install()
        balance.install()
        if run.adapter.kind != "none" or moe.freeze_router:  # an adapter does not save the bias
            provider.moe_router_bias_update_rate = 0.0
        # It communicates outside the layers that adapters wrap; core refuses it with the other two.
        if run.adapter.kind != "none" or moe.dispatcher == "allgather" or "shared_experts" in train.recompute_modules:
            provider.moe_shared_expert_overlap = False
        if moe.freeze_router:
            provider.register_pre_wrap_hook(_freeze_routers)
        provider.moe_router_dtype = moe.router_dtype
        provider.moe_grouped_gemm = moe.grouped_gemm
        provider.moe_router_force_load_balancing = moe.force_balance
        provider.moe_z_loss_coeff = moe.z_loss_coeff
        if moe.balance != "model":
            provider.moe_router_load_balancing_type = moe.balance
        if moe.aux_loss_coeff is not None:
            provider.moe_aux_loss_coeff = moe.aux_loss_coeff

    if run.model.dropout is not None:
        provider.hidden_dropout = provider.attention_dropout = run.model.dropout
    elif objectives.of(run).reference == "start":  # else dropout changes each answer
        provider.hidden_dropout = provider.attention_dropout = 0.0

    provider.recompute_granularity = None if train.recompute == "none" else train.recompute
    if train.recompute == "full":
        provider.recompute_method, provider.recompute_num_layers = "uniform", train.recompute_layers
        if train.recompute_first is not None:
            provider.recompute_method, provider.recompute_num_layers = "block", train.recompute_first
    if train.recompute == "selective":
        provider.recompute_modules = list(train.recompute_modules)
    if train.cuda_graphs and device.has_gpu():
        recorded_layers.choose(run, provider)
    if device.compiles():
        from trainer.megatron import activations, norms, quantized

        activations.install()
        norms.install()
        if train.fp8 == "delayed" and run.adapter.kind == "none" and not provider.num_moe_experts:
            quantized.install()
    device.choose_kernels(provider, every_weight=run.adapter.kind == "none", fp16=run.train.precision == "fp16")
    return provider


def _freeze_routers(model: list) -> list:
    for stage in model:
        for name, weight in stage.named_parameters():
            if ".router." in name:
                weight.requires_grad = False
    return model
