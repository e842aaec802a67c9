"""Loader for vLLM that unpacks a quantised release: vLLM then serves training's initial weights, in bf16 or fp32.

With its own loader, vLLM would compute with the codes and round every activation to FP8. Its answers would then not be
comparable with the trained model, which is exported unpacked. Each process of vLLM unpacks all weights and keeps its
part. UNPACKED of trainer/serving/engine.py makes every process of vLLM import this file.
"""

from collections.abc import Generator
from pathlib import Path

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from conf.model_files import quantization
from trainer.weights import released, released_tensors


class Worker:
    """Base class that vLLM adds to its workers; it is empty."""


@register_model_loader("unpacked")
class Loader(DefaultModelLoader):
    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        config = model_config.hf_config
        if getattr(config, quantization.KEY, "") is None:
            delattr(config, quantization.KEY)  # gpt-oss's class reads it if the attribute exists
        release = released.read(Path(model_config.model))
        return ((name, released_tensors.read(release, name)) for name in release.weights)
