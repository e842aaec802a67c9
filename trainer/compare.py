"""Compare a base's first layers with transformers', on the same tokens.

    python -m trainer.compare CONF [key=value ...]      one process, on the CPU; CONF's layout does not matter

Reads <paths.model> and <paths.base>. trainer.convert does the same comparison before it publishes a base; this command
is for bases converted with model.compare false or by an earlier version. It needs memory for these layers in fp32.
"""

import json
import os
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints
from trainer.checks import inputs
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say
from trainer.weights import atomic_folder

REPORT = "layers.json"  # in the base


def main(run: Run) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformer Engine multiplies fp32 on a GPU in TF32
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device.start()
    import torch

    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    base = Path(run.paths.base)
    facts = checkpoints.require(base, "paths.base", "python -m trainer.convert")
    here(run, base)
    checkpoints.mark(base, **{name: fact for name, fact in facts.items() if name != "files"})  # REPORT is a new file
    torch.distributed.destroy_process_group()


def converted(run: Run, partial: Path) -> None:
    """Compare the new base before it is marked as complete. All ranks must call this."""
    if run.model.compare:
        atomic_folder.barrier()  # until rank 0 has written the index of the pieces
        here(run, partial, is_new=True)
    elif atomic_folder.rank() == 0:
        say("convert: no layer was compared with transformers', because model.compare is false")


def here(run: Run, base: Path, is_new: bool = False) -> None:
    """Compare in these processes, without a GPU. Write the differences to the base."""
    import torch

    from trainer.weights.conversion import same_function

    torch.set_num_threads(1)  # the layers are small; memory is the limit
    with megatron_to(Path(run.paths.logs)):
        differences = same_function.compare(run, checkpoints.step_folder(base, 0), is_new)
    if atomic_folder.rank() > 0:
        return
    (base / REPORT).write_text(json.dumps({"bound": same_function.BOUND, "differences": differences}, indent=1))
    say(f"convert: {', '.join(differences)} agree with transformers within {max(differences.values()):.0e}")


if __name__ == "__main__":
    entry.start(main, inputs.check_compare, alone=True)
