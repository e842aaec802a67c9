"""Compare a base's first layers with transformers', on the same tokens.

    python -m trainer.compare CONF [key=value ...]      one process, on the CPU; CONF's layout does not matter

Reads <paths.model> and <paths.base>. trainer.convert does the same to what it has converted, before the base is there;
this command is for bases that were made before, or with model.compare false. Memory is that of the layers in fp32.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from conf.load import dump
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.checks import inputs
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say

REPORT = "layers.json"  # in the base
ALONE = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "GANG_", "TRAINER_")


def main(run: Run) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformer Engine multiplies fp32 on a GPU with 10 bits
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device.start()
    import torch

    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    here(run, Path(run.paths.base))
    torch.distributed.destroy_process_group()


def converted(run: Run, partial: Path) -> None:
    """Compare what was converted just now. Called by one rank; the folder is not marked as a base yet."""
    if not run.model.compare:
        say("convert: no layer was compared with transformers', as model.compare is false")
    elif run.world == 1 and not device.has_gpu():
        here(run, partial)
    else:
        _apart(run, partial)


def here(run: Run, base: Path) -> None:
    """Compare in this process, which is the only one and has no GPU. Leaves the differences in the base."""
    from trainer.weights.conversion import same_function

    with megatron_to(Path(run.paths.logs)):
        found = same_function.compare(run, checkpoints.step_folder(base, 0))
    (base / REPORT).write_text(json.dumps({"bound": same_function.BOUND, "differences": found}, indent=1))
    say(f"convert: {', '.join(found)} are what transformers computes, to {max(found.values()):.0e} of it")


def _apart(run: Run, base: Path) -> None:
    """Compare in a process without GPU and other ranks. It ends with this one."""
    paths = run.paths.model_copy(update={"base": str(base)})
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ALONE)}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        resolved = Path(folder) / "resolved.yaml"
        dump(run.model_copy(update={"paths": paths}), resolved)
        ended = subprocess.run(
            [sys.executable, "-m", "trainer.compare", str(resolved)],
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=end_with_parent,
        )
    if ended.returncode == 2:
        raise Fault("\n".join(line.removeprefix("error: ") for line in ended.stderr.strip().splitlines()))
    if ended.returncode:
        raise RuntimeError(f"trainer.compare ended with {ended.returncode}: {ended.stderr[-4000:]}")


if __name__ == "__main__":
    entry.start(main, inputs.check_compare, alone=True)
