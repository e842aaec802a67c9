"""Patch for transformers' Mamba-2 layers of Nemotron-H in torch, without kernels: they compute a row as one chunk.

transformers sums states over the wrong axis: all tokens after the first chunk_size of a row get wrong states. Remove
when it sums over the chunks that a state comes from.
"""

from trainer.patches import versions


def install() -> None:
    versions.check(__name__)
    from transformers.utils.import_utils import is_torch_available

    if not is_torch_available():  # hidden, as in a process that only needs the tokenizer
        return
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    usual = NemotronHMamba2Mixer.torch_forward

    def one_chunk(self, input_states, *args, **kwargs):
        self.chunk_size = max(self.chunk_size, input_states.shape[1])
        return usual(self, input_states, *args, **kwargs)

    if usual.__name__ != one_chunk.__name__:
        NemotronHMamba2Mixer.torch_forward = one_chunk
