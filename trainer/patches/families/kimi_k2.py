"""Patch for Kimi-K2: transformers reads its config.json, which is DeepSeek-V3's with another model_type.

The release includes code for a transformers without DeepSeek-V3
(https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/configuration_deepseek.py), and transformers has no
model_type kimi_k2 (https://github.com/huggingface/transformers/tree/main/src/transformers/models). vLLM also reads it
as DeepSeek-V3. Remove when transformers has it.
"""

from trainer.patches import versions

NAME = "kimi_k2"


def install() -> None:
    """Make transformers build DeepSeek-V3's configuration for the name."""
    versions.check(__name__)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING.register(NAME, _KimiK2Config, exist_ok=True)  # pyright: ignore[reportArgumentType]


class _KimiK2Config:
    """The interface that AutoConfig needs of a configuration class; transformers is imported only when used."""

    model_type = NAME

    def __new__(cls, **numbers):
        from transformers import DeepseekV3Config

        return DeepseekV3Config(**numbers)

    @staticmethod
    def from_dict(config_dict, **options):
        from transformers import DeepseekV3Config

        # with DeepSeek-V3's model_type, by which transformers stacks the experts of a release
        return DeepseekV3Config.from_dict(config_dict | {"model_type": DeepseekV3Config.model_type}, **options)
