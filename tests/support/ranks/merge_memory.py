"""Memory that a merge takes, by the number of weights: answer.json in paths.output has its growth in bytes."""

import json
import os
import resource
from pathlib import Path

from conf.schema.run import Run
from contract.output_marks import JOURNAL

WIDTH = 1024  # a weight has 4 MB in fp32


def main(run: Run) -> None:
    import torch

    from trainer.weights import merge, released, torch_dist
    from trainer.weights.exported import merged_format, parts
    from trainer.weights.mapping import Part
    from trainer.weights.trained import Trained

    torch.set_num_threads(1)
    folder = Path(run.paths.output)
    parts.SIDE_BY_SIDE = 4 * WIDTH * WIDTH
    found = {}
    for count in (4, 40):
        place = folder / str(count)
        model, stored = released.read(place / "model"), torch_dist.open_checkpoint(place / "checkpoint")
        names, sums = list(model.weights), released.checksums(model, model.weights)[0]
        a, b = (stored.places[f"linear_{part}"] for part in ("in", "out"))
        adapters = {name: (merge.Adapter(a, b, None, Part(name, None), 16),) for name in names}
        trained = Trained(model, "", sums, stored, None, adapters)
        (place / JOURNAL).mkdir()
        before = _most()
        parts.write(parts.Merged(trained), merged_format.layouts(model), place / "merged", place / JOURNAL)
        found[count] = _most() - before
    (folder / "answer.json").write_text(json.dumps(found))
    os._exit(0)


def _most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
