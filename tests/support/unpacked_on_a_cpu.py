"""A reinforcement learning whose vLLM keeps weights on a CPU as they come, as it does on a GPU.

    python -m tests.support.unpacked_on_a_cpu CONF [key=value ...]

PLANTED=flipped changes a bit of each bucket on its way when a transfer is repeated. This module takes the place of
vLLM's process as well.
"""

import os
import sys
from typing import Any

from trainer.reinforcement import vllm_process

NAME = "tests.support.unpacked_on_a_cpu"


def main(run: Any) -> None:
    from trainer import reinforce
    from trainer.reinforcement.engines import engine

    engine.PROGRAM = NAME
    reinforce.main(run)


def keep_unpacked() -> None:
    from trainer.patches import vllm_cpu

    with vllm_cpu.hidden():
        from vllm import _custom_ops
    _custom_ops._supports_onednn = False


def plant() -> None:
    from trainer.reinforcement.transfer import weight_engine

    put: Any = weight_engine.BucketEngine.put

    def flipped(self: Any, number: int, memory: Any) -> None:
        memory[8] ^= 1
        put(self, number, memory)

    if os.environ.get("PLANTED") == "flipped":
        weight_engine.BucketEngine.put = flipped


if __name__ == vllm_process.AS_WORKER:
    vllm_process.begin_as_worker()
    keep_unpacked()
    plant()
elif __name__ == "__main__" and sys.argv[1].isdigit():
    keep_unpacked()
    plant()
    vllm_process.main(int(sys.argv[1]))
elif __name__ == "__main__":
    from trainer.checks import inputs, places
    from trainer.startup import entry

    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="train")
