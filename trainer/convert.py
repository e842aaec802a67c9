"""Convert."""

import sys
from conf.load import load
from trainer import platform


def main(run):
    platform.start()
    import torch
    from trainer.model import make_provider, open_bridge

    bridge = open_bridge(run)
    provider = make_provider(run, bridge, load_weights=True)
    provider.finalize()
    torch.distributed.init_process_group(platform.backend())
    provider.initialize_model_parallel(seed=run.train.seed)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_megatron_model(model, run.paths.base)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(load(sys.argv[1], sys.argv[2:]))
