"""A base as Megatron-Bridge's own import makes it, with the whole model in memory. See conftest.ranks."""

import torch

from benchmarks import logits
from conf.schema.run import Run


def main(run: Run) -> None:
    bridge, _, chunks = logits.built(run)
    bridge.load_hf_weights(chunks)
    bridge.save_megatron_model(chunks, run.paths.base)
    torch.distributed.destroy_process_group()
