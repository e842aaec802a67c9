"""A tiny gpt-oss as OpenAI releases it: experts in codes of 4 bits and scales, all else in bf16."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trainer.rehearsal import tiny_models

EXCLUDED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTISED = {"quantization_config": {"modules_to_not_convert": EXCLUDED, "quant_method": "mxfp4"}}


def make(folder: Path) -> None:
    """Draw codes and scales in the place of experts' matrices, each row of the matrix in blocks of 32."""
    tiny_models.make_model("gpt-oss", folder)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for name in sorted(name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))):
        experts, width, out = tensors.pop(name).shape
        codes = torch.randint(256, (experts, out, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 125, codes.shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | QUANTISED))


def unpacked(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of such a release in bf16, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    released = load_file(folder / "model.safetensors")
    stacks = {name.removesuffix("_blocks") for name in released if name.endswith("_blocks")}
    plain = {name: tensor for name, tensor in released.items() if not name.endswith(("_blocks", "_scales"))}
    parts = {name: (released[f"{name}_blocks"], released[f"{name}_scales"]) for name in stacks}
    return plain | {name: convert_moe_packed_tensors(*both).contiguous() for name, both in parts.items()}
