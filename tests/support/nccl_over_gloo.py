"""A reinforcement learning whose weights go over by the transport nccl on a host without GPUs: gloo takes NCCL's place.

    python -m tests.support.nccl_over_gloo CONF [key=value ...]

Both sides take the steps that they take on GPUs, but for the process group below them.
"""

from conf.schema.run import Run
from trainer import reinforce
from trainer.checks import inputs, places
from trainer.reinforcement.engines import settings
from trainer.startup import entry


def main(run: Run) -> None:
    settings.transport = lambda run: "nccl"
    reinforce.main(run)


if __name__ == "__main__":
    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="train")
