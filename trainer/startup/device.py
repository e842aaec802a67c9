"""Choice, once per process, whether Megatron runs on this host's GPU or, over gloo, on its CPU.

start() comes before the first import of Megatron in every entry point. With a GPU it changes nothing but what
trainer/patches/import_fixes.py explains. Without one it puts trainer/startup/cpu between Megatron and the machine:
torch.cuda's functions (cpu/cuda.py), Transformer Engine's modules (cpu/stand_in) and one operation that gloo wants
called differently.
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


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0


def compiles() -> bool:
    """Whether kernels can be compiled here: torch's, and Triton's, which wants the same compiler."""
    return has_gpu() and os.environ.get("TORCHDYNAMO_DISABLE") == "0"


def memory_in_use() -> int:
    """Bytes of this rank's GPU that any process holds; 0 without a GPU."""
    import torch

    if not has_gpu():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def cores() -> int:
    """The cores of this host that are this process's share."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def backend() -> str:
    return "nccl" if has_gpu() else "gloo"


def start() -> None:
    """Prepare this process for Megatron. A second call changes nothing."""
    if "megatron.core" in sys.modules:
        return
    # Bridge's deprecations and its list of kernels that are not installed: 40 lines that no user can act on.
    warnings.filterwarnings("ignore", module=NOISY)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Routing gives every step other sizes of tensors: what the allocator holds and cannot use fell from 11 to 5 % of
    # the peak on full fine-tuning of GLM's layers, on an H200. Read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "0" if has_gpu() and _c_compiler() else "1")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch reads all packages' metadata for other devices
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything a rank reads was put on its disk beforehand
    # Read when torch is loaded. OpenMP's threads else spin while they wait for one another, for 16 ms an operation when
    # the kernel has put them on one CPU: 10 s in the first step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()  # of the 470000 objects that imports make, none is garbage: looking for some takes 2 s
    if not has_gpu():
        _put_cpu_below()
    from trainer.patches import import_fixes, lazy_bridge

    lazy_bridge.install()
    import_fixes.install(compiles=has_gpu())
    if not has_gpu():
        from trainer.startup.cpu import cuda

        cuda.join_random_states()
        cuda.copy_recomputed()
    gc.freeze()
    gc.enable()


def _c_compiler() -> str | None:
    """The C compiler that Triton needs.

    With Megatron's activation functions compiled, a step on an H200 takes 0.66 of the time for GPT2-large and 0.9 for
    layers of GLM-4.7, of what it takes without.
    """
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")


def _put_cpu_below() -> None:
    import torch

    from trainer.startup.cpu import cuda, gloo

    sys.path.insert(0, str(Path(__file__).parent / "cpu" / "stand_in"))
    # 8 ranks on 2 cores, each with a thread per core, would spend their time waiting for one another.
    torch.set_num_threads(cores())
    gloo.install()
    cuda.install()


def choose_kernels(provider, every_weight: bool = False, fp16: bool = False) -> None:
    """Choose fused kernels where there is a GPU and they gain something. The model computes the same function.

    `every_weight` is trained, and not an adapter. `fp16` is the precision, which not all of them know.
    """
    provider.gradient_accumulation_fusion = every_weight and has_gpu()
    if has_gpu():
        # Megatron's own makes two copies of the logits in fp32; Transformer Engine's works in their place, not in fp16.
        provider.cross_entropy_loss_fusion = True
        provider.cross_entropy_fusion_impl = "native" if fp16 else "te"
        # Without a bias there is one sum, and nothing to fuse. Where dropout is 0, no mask is kept. Experts that have
        # biases add them with their tokens' weights.
        biases = provider.add_bias_linear and not provider.num_moe_experts
        provider.bias_dropout_fusion = biases or (provider.hidden_dropout > 0 and not provider.add_bias_linear)
        # A gated layer keeps both halves, and no more; Bridge leaves it off for Qwen.
        provider.bias_activation_fusion = provider.bias_activation_fusion or provider.gated_linear_unit
        # Bridge asks for it in Llama alone. Else queries and keys are turned by some thirteen kernels each, and twenty
        # where rows are packed. It scales nothing, as YaRN does, and latent attention has its own.
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
    provider.moe_shared_expert_overlap = False  # overlaps on a second stream: nothing to overlap with here
    provider.persist_layer_norm = False
    # Gloo sends from the buffer itself until it is done; NCCL orders sends on a stream before the buffer is reused.
    provider.deallocate_pipeline_outputs = False
