"""A base as Megatron-Bridge's own import makes it, with the whole model in memory. See conftest.ranks."""

import torch

from conf.schema.run import Run
from trainer.megatron.model import make_provider, open_bridge
from trainer.startup import device


def main(run: Run) -> None:
    device.start()
    torch.distributed.init_process_group("gloo")
    bridge = open_bridge(run)
    provider = make_provider(run, bridge)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_hf_weights(chunks)
    bridge.save_megatron_model(chunks, run.paths.base)
    torch.distributed.destroy_process_group()
