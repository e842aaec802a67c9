"""Ranks as forks of this process, for many short runs: Megatron is imported once instead of once per rank and run.

Call import_all() first, and start no threads or process group before or after it. Only for rehearsals and tests: a real
run's ranks are started by torchrun, which monitors them.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from conf import families
from conf.schema.run import Run
from trainer.startup import device, entry, forks


def import_all() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count())  # one thread per rank
    device.start()
    import megatron.bridge.training.finetune
    import megatron.bridge.training.gpt_step  # noqa: F401

    from trainer.megatron import bridges

    for config in families.tiny().values():
        bridges.load(config)


def call(command: Callable[[Run], None], run: Run, log: Path, until: Callable[[], bool] = lambda: False) -> int:
    """Run a command's main on run.world ranks, until until() becomes true (trainer/startup/forks.py).

    Return 0, or the first failed rank's code. `log` gets their output.
    """
    fault = log.with_suffix(".fault")
    log.parent.mkdir(parents=True, exist_ok=True)
    fault.unlink(missing_ok=True)
    code = forks.run(partial(_work, command, run, log, fault), run.world, lambda _: None, until)
    if fault.exists():  # of the first rank that failed, like in a real run
        with log.open("a") as out:
            out.write(fault.read_text())
    return code


def _work(command: Callable[[Run], None], run: Run, log: Path, fault: Path) -> None:
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ |= {"LOCAL_WORLD_SIZE": str(run.world), entry.FAULT_FILE: str(fault)}
    import torch

    # OpenMP's threads are not forked. An operation that needs threads of the parent process would wait forever.
    torch.set_num_threads(1)
    with entry.faults_in_one_line():
        command(run)
