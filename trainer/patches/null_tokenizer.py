"""Patch for random tokens in packs: give megatron-core's NullTokenizer an eos_id.

Megatron-Bridge's packed data sets read the tokenizer's eos_id
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/data/packing/gpt_sft.py), and
megatron-core's NullTokenizer has none
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tokenizers/text/libraries/null_tokenizer.py). Remove when
it has one.
"""

# pyright: reportAttributeAccessIssue=false

from trainer.patches import versions


def install() -> None:
    """Let the NullTokenizer use its end of a document as its end of a sequence."""
    versions.check(__name__)
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    NullTokenizer.eos_id = property(lambda self: self._eod_id)
