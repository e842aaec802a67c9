"""Patch for the norms inside latent attention: their epsilon is 1e-6, as in transformers and the releases' own code.

Megatron-Bridge builds them with the epsilon of all other norms, config.json's rms_norm_eps
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/glm/glm47_flash_bridge.py), which
is 1e-5 in GLM-4.7-Flash. Remove when it builds those two like the classes of transformers.
"""

from trainer.patches import versions

EPSILON = 1e-6
FUSED = ("linear_q_up_proj", "linear_kv_up_proj")  # the norm of a low-rank product is a part of the second factor


def keep_epsilon(provider) -> None:
    """Set the epsilon of latent attention's norms in the models that this provider makes."""
    versions.check(__name__)
    provider.register_pre_wrap_hook(_set)


def _set(model: list) -> list:
    for stage in model:
        for name, module in stage.named_modules():
            if name.endswith(FUSED):
                module.eps = EPSILON
    return model
