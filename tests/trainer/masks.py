"""Prints, as JSON, the tokens, labels and loss mask of the first rows as training sees them. For test_masks.py."""

import json

from conf.schema import Run
from trainer import platform


def main(run: Run) -> None:
    platform.start()
    from trainer import prepared, sequences

    place = prepared.folder(run)
    rows = sequences.Rows(sequences.file(place, "training"), run.data.seq_length, prepared.load(place).pad_id)
    for row in range(8):
        batch = rows.collate_fn([rows[row]])
        print(json.dumps({key: batch[key][0].tolist() for key in ("tokens", "labels", "loss_mask")}))
