"""Patch for Kimi-K2: transformers reads its config.json, which is DeepSeek-V3's by another model_type.

The release brings code of its own for a transformers that has no DeepSeek-V3
(https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/configuration_deepseek.py), and transformers knows no
model_type kimi_k2 (https://github.com/huggingface/transformers/tree/main/src/transformers/models). vLLM reads it as
DeepSeek-V3's, too. The patch can go when transformers has it.
"""

from trainer.patches import versions

WRITTEN_FOR = {"transformers": ("5.12.1",)}
NAME = "kimi_k2"


def install() -> None:
    """Have transformers build DeepSeek-V3's configuration for the name."""
    versions.check(__name__, WRITTEN_FOR)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING.register(NAME, _KimiK2Config, exist_ok=True)  # pyright: ignore[reportArgumentType]


class _KimiK2Config:
    """What AutoConfig asks of a configuration's class; it imports none before."""

    model_type = NAME

    def __new__(cls, **numbers):
        from transformers import DeepseekV3Config

        return DeepseekV3Config(**numbers)

    @staticmethod
    def from_dict(config_dict, **options):
        from transformers import DeepseekV3Config

        # by DeepSeek-V3's name, too: transformers stacks the experts of a release by it
        return DeepseekV3Config.from_dict(config_dict | {"model_type": DeepseekV3Config.model_type}, **options)
