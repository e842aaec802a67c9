"""Print the backend of attention that Megatron asks Transformer Engine for. For test_precision.py."""

from conf.schema.run import Run
from trainer.startup import device


def main(run: Run) -> None:
    device.start()
    from trainer.megatron.model import make_provider, open_bridge

    print(make_provider(run, open_bridge(run)).attention_backend.name)
