"""trainer.train, with a second step in which the last rank's gradients hold what is not a number."""

import math
import os

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer import train
    from trainer.patches.gradients.local_norms import LocalGradients

    keep, calls = LocalGradients.keep, 0

    def wrong(self, group, *args, **kwargs) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and int(os.environ["RANK"]) == run.world - 1:
            group.buckets[0].grad_data[0] = math.nan
        keep(self, group, *args, **kwargs)

    LocalGradients.keep = wrong
    train.main(run)
