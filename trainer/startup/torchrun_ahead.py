"""Torchrun of the next attempt of a gang, started ahead: it imports what ranks import, and waits.

    python -m trainer.startup.torchrun_ahead [MODULES]     MODULES lists the modules of a rank after its first step

Imports are most of the time that a new attempt needs until its first step. This process has done them. One line of JSON
on its standard input has the arguments of torchrun, the environment and the log; then it starts ranks as
trainer/startup/torchrun.py does, except that they are forks. It ends if its standard input closes before.

A process that has initialised CUDA cannot be forked. If an import has done so, this process begins again without
MODULES, and the ranks import them. A module that cannot be imported is left to the ranks too.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from pathlib import Path

from trainer.patches import forked_ranks
from trainer.startup import device


def main() -> None:
    device.start()
    for name in json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if sys.argv[1:] and forked_ranks.has_initialised_cuda():
        os.execv(sys.executable, [sys.executable, "-m", "trainer.startup.torchrun_ahead"])
    gc.freeze()  # collections in the ranks would copy these pages
    if not (line := sys.stdin.readline()):
        return
    start = json.loads(line)
    os.environ.clear()
    os.environ.update({device.COUNTS_BY_NVML: "1"} | start["environment"])  # torchrun asks whether there are GPUs
    with open(start["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from trainer.startup import torchrun

    forked_ranks.install()
    torchrun.main(start["arguments"])


if __name__ == "__main__":
    main()
