"""Megatron-Bridge's tools in one process on a CPU, with which benchmarks/convert.py compares this project's tools.

    python -m benchmarks.bridge_tools import MODEL OUT                 AutoBridge.import_ckpt
    python -m benchmarks.bridge_tools export MODEL BASE OUT            AutoBridge.export_ckpt
    python -m benchmarks.bridge_tools merge MODEL BASE ADAPTER OUT     as Bridge's examples/peft/merge_lora.py, exported

BASE is the result of the import. Loading and saving ask nvidia-modelopt whether a checkpoint or model is quantised. It
is not installed here, so this module answers no in its place.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import os
import sys
import types
from pathlib import Path

import yaml

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ASK_MODELOPT = {
    "megatron.bridge.training.post_training.checkpointing": "has_modelopt_state",
    "modelopt.torch.quantization": None,
    "modelopt.torch.quantization.utils": "is_quantized",
}


def main() -> None:
    tool, model, *paths = sys.argv[1:]
    os.environ.update(ONE_PROCESS)
    from trainer.startup import device

    device.start()
    import torch

    from trainer.patches import lazy_bridge

    lazy_bridge.load_family("Qwen3MoeForCausalLM")
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    described = AutoBridge.to_megatron_provider

    def without_kernels_of_a_gpu(*args, **kwargs):
        provider = described(*args, **kwargs)
        device.choose_kernels(provider)
        return provider

    AutoBridge.to_megatron_provider = without_kernels_of_a_gpu
    for name, question in ASK_MODELOPT.items():
        sys.modules[name] = types.ModuleType(name)
        if question:
            setattr(sys.modules[name], question, lambda *_: False)
    if tool != "export":  # export starts and ends the process group itself
        torch.distributed.init_process_group("gloo")
    if tool == "import":
        AutoBridge.import_ckpt(model, *paths, torch_dtype=torch.bfloat16)
        return
    bridge = AutoBridge.from_hf_pretrained(model)
    if tool == "export":
        bridge.export_ckpt(*paths, show_progress=False)
    else:
        _merge(bridge, *map(Path, paths))


def _merge(bridge, base: Path, adapter: Path, out: Path) -> None:
    """Load the complete base and adapter, merge them, and write the result in Hugging Face's format."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.checkpointing import (
        _generate_model_state_dict,
        apply_peft_adapter_filter_to_state_dict,
    )
    from megatron.core import dist_checkpointing

    lora = LoRA(**yaml.safe_load((adapter / "run_config.yaml").read_text())["peft"])
    model = lora(bridge.load_megatron_model(str(base), wrap_with_ddp=False), training=False)
    asked = apply_peft_adapter_filter_to_state_dict(_generate_model_state_dict(model, {}), lora)
    model[0].load_state_dict(dist_checkpointing.load(asked, str(adapter))["model"], strict=False)
    bridge.save_hf_pretrained(model, out, show_progress=False, merge_adapter_weights=True)


if __name__ == "__main__":
    main()
