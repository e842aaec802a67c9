"""Patch for recomputation of single modules below adapters.

A recomputed module gets no gradient, or fails, if its input requires none: in the first layer after a frozen embedding.
Megatron-Bridge handles this only for full recomputation; here also for single modules. Remove when its
maybe_enable_recompute_inputs_grad includes them; tests/trainer/test_train.py checks it.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/recompute.py
"""

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from trainer.patches import versions


def start_from_the_embedding(model) -> None:
    """Make the embedding's output require a gradient, although no weight needs one."""
    versions.check(__name__)
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, LanguageModelEmbedding) and module.config.recompute_granularity == "selective":
                module.register_forward_hook(_needs_gradient)


def _needs_gradient(_module, _inputs, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()
