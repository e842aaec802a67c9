"""Train."""

import sys
from conf.load import load
from trainer import platform


def main(run):
    platform.start()
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from trainer.model import open_bridge
    from trainer.recipe import make_config

    config = make_config(run, open_bridge(run), None)
    config.logger.skip_train_metrics_log = False
    finetune(config, forward_step)


if __name__ == "__main__":
    main(load(sys.argv[1], sys.argv[2:]))
