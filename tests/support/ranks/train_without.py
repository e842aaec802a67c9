"""Run trainer.train without some of trainer/patches: those that request.json in paths.output names."""

import contextlib
import json
from pathlib import Path

from conf.schema.run import Run
from tests.support.ranks.gradients_of_run import left_out
from trainer import train


def main(run: Run) -> None:
    with contextlib.ExitStack() as stack:
        for name in json.loads((Path(run.paths.output) / "request.json").read_text())["without"]:
            stack.enter_context(left_out(name))
        train.main(run)
