"""Compare a base's first layers with transformers', on the same tokens.

    python -m trainer.compare CONF [key=value ...]      one process, on the CPU; CONF's layout does not matter

Reads <paths.model> and <paths.base>. trainer.convert does the same to what it has converted, before the base is there;
this command is for bases that were made before, or with model.compare false. Memory is that of the layers in fp32.
"""

import json
import os
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints
from trainer.checks import inputs
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say

REPORT = "layers.json"


def main(run: Run) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformer Engine multiplies fp32 on a GPU with 10 bits
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device.start()
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    here(run, Path(run.paths.base))
    torch.distributed.destroy_process_group()


def here(run: Run, base: Path) -> None:
    """Compare in this process, which is the only one and has no GPU. Leaves the differences in the base."""
    from trainer.weights import same_function

    with megatron_to(Path(run.paths.logs)):
        found = same_function.compare(run, checkpoints.step_folder(base, 0))
    (base / REPORT).write_text(json.dumps({"bound": same_function.BOUND, "differences": found}, indent=1))
    worst = max(found.values())
    say(f"convert: {', '.join(found)} give what transformers' give, to {worst:.0e} of it")


if __name__ == "__main__":
    entry.start(main, inputs.check_model, alone=True)
