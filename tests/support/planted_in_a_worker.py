"""A reinforcement learning whose engine has two workers, the second of which gets weights wrongly from step 2 on.

    PLANTED=FAULT python -m tests.support.planted_in_a_worker CONF [key=value ...]

FAULT is "unheard": a tensor never reaches it; "halved": it loads half of what it was sent of one, behind all digests;
"flipped": one bit is changed on the way to it. This module takes the place of vLLM's process as well.
"""

import os
import sys
from typing import Any

from trainer.reinforcement import vllm_process

NAME = "tests.support.planted_in_a_worker"
TENSOR = "model.layers.1.self_attn.o_proj.weight"


def main(run: Any) -> None:
    from trainer import reinforce
    from trainer.reinforcement.engines import engine

    engine.PROGRAM = NAME
    reinforce.main(run)


def plant() -> None:
    """Change what this worker does of a transfer, if it is the second one."""
    from trainer.reinforcement.transfer import weight_engine, wire

    base: Any = weight_engine.BucketEngine
    begin, begun = base.start_weight_update, list[None]()

    def start(self: Any) -> None:
        begun.append(None)
        begin(self)

    def receive(self: Any, update: Any) -> None:
        memory = self.received(update)
        fault = os.environ["PLANTED"] if self.parallel_config.rank == 1 and len(begun) > 2 else ""
        if fault == "flipped":
            memory[100] ^= 1
        found = dict(wire.taken_apart(update.metas, memory))
        if fault == "unheard":
            found.pop(TENSOR, None)
        if fault == "halved" and TENSOR in found:
            found[TENSOR] = found[TENSOR] * 0.5
        self.model.load_weights(self.recorded(found.items()))

    base.start_weight_update, base.receive_weights = start, receive


if __name__ == vllm_process.AS_WORKER:
    vllm_process.begin_as_worker()
    plant()
elif __name__ == "__main__" and sys.argv[1].isdigit():
    vllm_process.main(int(sys.argv[1]))
elif __name__ == "__main__":
    from trainer.checks import inputs, places
    from trainer.startup import entry

    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="train")
