"""Bridge of Qwen3.5, dense and with experts: Megatron-Bridge's for the text model, by the names of a release.

The text model of a model with vision is the same as the one that transformers saves alone.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from pathlib import Path
from types import SimpleNamespace

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.qwen import qwen35_bridge
from megatron.core.models.gpt.gpt_model import GPTModel

from conf import families
from conf.model_files import weights
from trainer.patches.families import delta_nets


class TextBridge:
    """Common part of both bridges."""

    def provider_bridge(self, hf_pretrained):
        config = hf_pretrained.config
        text = config.get_text_config()
        text.dtype = text.dtype or config.dtype
        provider = super().provider_bridge(SimpleNamespace(config=text))
        provider.share_embeddings_and_output_weights = config.tie_word_embeddings
        if (names := self._names()) and not any(name.startswith(self._family().ahead) for name in names):
            provider.mtp_num_layers = None  # transformers saves the key, but not the layer
        return provider

    def _family(self) -> families.Family:
        return families.named(self.hf_config.architectures[0])

    def _names(self) -> set[str]:
        return weights.names(Path(self.hf_config._name_or_path))


class DenseBridge(TextBridge, qwen35_bridge.Qwen35Bridge):
    def mapping_registry(self):
        root = self._family().root(self._names())
        return MegatronMappingRegistry(*self._get_dense_lm_mappings(root), *self._get_dense_mtp_mappings())


class ExpertsBridge(TextBridge, qwen35_bridge.Qwen35MoEBridge):
    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        provider.moe_router_load_balancing_type = "aux_loss"  # over rows, as in other families
        provider.moe_aux_loss_coeff = hf_pretrained.config.get_text_config().router_aux_loss_coef
        return provider

    def mapping_registry(self):
        family, names = self._family(), self._names()
        of_model = self._get_moe_lm_mappings(family.root(names), experts_packed=family.stacks(names))
        of_mtp = self._get_moe_mtp_mappings(mtp_experts_packed=family.stacks(names, "mtp"))
        return MegatronMappingRegistry(*of_model, *of_mtp)


delta_nets.use_kernels(qwen35_bridge)
for kind, bridge in ("", DenseBridge), ("Moe", ExpertsBridge):
    for model in ("ForCausalLM", "ForConditionalGeneration"):
        MegatronModelBridge.register_bridge(source=f"Qwen3_5{kind}{model}", target=GPTModel)(bridge)
