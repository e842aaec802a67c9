"""Decide once per process whether Megatron runs on this host's GPU, or on its CPU with gloo.

Every entry point calls start() before the first import of Megatron. With a GPU it only installs what
trainer/patches/import_fixes.py explains. Without a GPU it installs the stand-ins of trainer/startup/cpu: torch.cuda's
functions (cpu/cuda.py), Transformer Engine's modules (cpu/stand_in) and the adapter for gloo (cpu/gloo.py).
"""

import functools
import gc
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

NOISY = rf"(megatron|torch|transformers|{re.escape(f'{__package__}.cpu.cuda')})\b"  # modules whose warnings are hidden
# Without it torch.cuda.is_available(), which imports and torchrun call, initialises CUDA, and forks cannot use a GPU.
COUNTS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0


def compiles() -> bool:
    """Whether kernels of torch and of Triton, which needs the same compiler, can be compiled here."""
    return has_gpu() and os.environ.get("TORCHDYNAMO_DISABLE") == "0"


def memory_in_use() -> int:
    """Bytes of this rank's GPU that all processes together use; 0 without a GPU."""
    import torch

    if not has_gpu():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def cores() -> int:
    """Number of the host's cores that are this process's share."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def backend() -> str:
    return "nccl" if has_gpu() else "gloo"


def start() -> None:
    """Prepare this process for Megatron. A second call changes nothing."""
    if "megatron.core" in sys.modules:
        return
    # Bridge's deprecations and its list of missing kernels: 40 lines that do not help a user.
    warnings.filterwarnings("ignore", module=NOISY)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Routing changes the sizes of tensors in every step. With expandable segments, reserved but unusable memory fell
    # from 11 to 5 % of the peak (full fine-tuning of GLM's layers, H200). Read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault(COUNTS_BY_NVML, "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "0" if has_gpu() and _c_compiler() else "1")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch reads all packages' metadata for other devices
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files that a rank reads are already on its disk
    # Read when torch is loaded. By default OpenMP's threads spin while they wait for each other: 16 ms per operation if
    # the kernel has put them on the same CPU, which costs 10 s in the first step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()  # imports create 470000 objects and no garbage: collections would take 2 s
    if not has_gpu():
        _install_cpu()
    from trainer.patches import import_fixes, lazy_bridge, store_address

    lazy_bridge.install()
    store_address.install()
    import_fixes.install(compiles=has_gpu())
    if not has_gpu():
        from trainer.startup.cpu import cuda

        cuda.adapt_megatron()
    gc.freeze()
    gc.enable()


def _c_compiler() -> str | None:
    """The C compiler that Triton needs.

    With compiled activation functions, a step of GPT2-large on an H200 takes 0.66 of its time without, and a step of
    layers of GLM-4.7 0.9.
    """
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")


def _install_cpu() -> None:
    import torch

    from trainer.startup.cpu import cuda, gloo

    sys.path.insert(0, str(Path(__file__).parent / "cpu" / "stand_in"))
    # With a thread per core in each rank, 8 ranks on 2 cores would mostly wait for each other.
    torch.set_num_threads(cores())
    gloo.install()
    cuda.install()


def choose_kernels(provider, every_weight: bool = False, fp16: bool = False) -> None:
    """Choose fused kernels if there is a GPU and they save time or memory. The model computes the same function.

    `every_weight`: the training is a full fine-tuning, not an adapter. `fp16`: the precision, which some kernels do not
    support.
    """
    from torch.nn.functional import gelu

    provider.gradient_accumulation_fusion = every_weight and has_gpu()
    if has_gpu():
        # Megatron's loss copies the logits twice in fp32. Transformer Engine's works in place, but not in fp16.
        provider.cross_entropy_loss_fusion = True
        provider.cross_entropy_fusion_impl = "native" if fp16 else "te"
        # Without a bias there is only one sum, and with dropout 0 no mask: nothing to fuse. Experts add their biases
        # with their tokens' weights, outside this kernel.
        biases = provider.add_bias_linear and not provider.num_moe_experts
        provider.bias_dropout_fusion = biases or (provider.hidden_dropout > 0 and not provider.add_bias_linear)
        # With it a gated layer keeps only its two halves for backward. Bridge leaves it off for Qwen.
        provider.bias_activation_fusion = provider.bias_activation_fusion or provider.gated_linear_unit
        by_tanh = getattr(provider.activation_func, "__name__", "") == "fast_gelu"
        if by_tanh and provider.num_moe_experts:  # core has no fused one for experts
            provider.bias_activation_fusion = False
            provider.activation_func = functools.partial(gelu, approximate="tanh")
        elif by_tanh:
            provider.activation_func = gelu  # fused, it is the same approximation
        # Bridge enables it only for Llama. Without it queries and keys are rotated by about thirteen kernels each, or
        # twenty if rows are packed. It cannot scale, as YaRN needs, and latent attention has its own kernel.
        plain = provider.position_embedding_type == "rope" and not provider.multi_latent_attention
        provider.apply_rope_fusion = provider.apply_rope_fusion or plain
        return
    provider.apply_rope_fusion = False
    provider.bias_activation_fusion = False
    provider.bias_dropout_fusion = False
    provider.cross_entropy_loss_fusion = False
    provider.masked_softmax_fusion = False
    provider.moe_permute_fusion = False
    provider.moe_router_fusion = False
    provider.moe_shared_expert_overlap = False  # needs a second stream
    provider.persist_layer_norm = False
    # Gloo reads the buffer until the send is complete; NCCL orders sends on a stream before the buffer is reused.
    provider.deallocate_pipeline_outputs = False
