"""Merges that something goes wrong with, and what is said of each: answer.json in paths.output."""

import json
import os
import shutil
from pathlib import Path

from conf.schema.run import Run
from contract.output_marks import JOURNAL

WIDTH, LAYERS = 256, 3
FAULTS = ["none", "other product", "written elsewhere", "damaged on disk", "cut on disk", "edited release"]


def main(run: Run) -> None:
    import torch

    from contract.faults import Fault
    from trainer.weights import low_rank, merge, released, torch_dist
    from trainer.weights.exported import merged_format, parts
    from trainer.weights.mapping import Part
    from trainer.weights.trained import Trained

    torch.set_num_threads(1)
    low_rank.AT_ONCE = 64 * WIDTH  # several blocks are one weight
    folder, write, merged = Path(run.paths.output), parts._write, low_rank.Change.blocks
    found = {}
    for fault in FAULTS:
        place = folder / fault
        shutil.copytree(folder / "model", place / "model")
        model, stored = released.read(place / "model"), torch_dist.open_checkpoint(folder / "checkpoint")
        names, sums = list(model.weights), released.checksums(model, model.weights)[0]
        a, b = (stored.places[f"linear_{part}"] for part in ("in", "out"))
        adapters = {name: (merge.Adapter(a, b, None, Part(name, None), 16),) for name in names}
        trained = Trained(model, "", sums, stored, None, adapters)

        def fail(name, blocks, entry, new, place=place, fault=fault, model=model, spoilt=names[1]):
            """Write as it is done, and spoil one weight before it is read back."""
            checksum = write(name, blocks, entry, new)
            if name == spoilt:
                written, last = place / "merged/model.safetensors", entry.start + entry.size - 2
                if fault == "damaged on disk":
                    change(written, last)
                elif fault == "cut on disk":
                    os.truncate(written, last)
                elif fault == "edited release":
                    change(place / "model" / entry.file, model.tensors[name].start + 2)
            return checksum

        def other(change, weight, fault=fault):
            """The merged weight, with a number of the last block that is two steps of bf16 off."""
            for block in merged(change, weight):
                block[-1, -1] *= 1 + 2**-5 if fault == "other product" else 1
                yield block

        parts._write, low_rank.Change.blocks = fail, other
        if fault == "written elsewhere":
            parts._write = lambda name, blocks, entry, new: write(
                name, list(map(torch.clone, blocks))[::-1], entry, new
            )
        (place / JOURNAL).mkdir()
        found[fault] = "written"
        try:
            parts.write(parts.Merged(trained), merged_format.layouts(model), place / "merged", place / JOURNAL)
        except Fault as error:
            found[fault] = str(error)
    (folder / "answer.json").write_text(json.dumps(found))
    os._exit(0)


def change(path: Path, place: int) -> None:
    """Change the number that lies there a little."""
    with path.open("r+b") as file:
        file.seek(place)
        before = file.read(1)
        file.seek(place)
        file.write(bytes([before[0] ^ 1]))
