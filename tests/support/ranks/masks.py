"""Print, as JSON, the tokens, labels and loss mask of the first rows as training sees them. For test_masks.py."""

import json

from conf.schema.run import Run
from trainer.startup import device


def main(run: Run) -> None:
    device.start()
    from trainer.data import prepared
    from trainer.megatron import token_files

    place = prepared.folder(run)
    rows = token_files.Rows(token_files.file(place, "training"), run.data.seq_length, prepared.load(place).pad_id)
    for row in range(8):
        batch = rows.collate_fn([rows[row]])
        print(json.dumps({key: batch[key][0].tolist() for key in ("tokens", "labels", "loss_mask")}))
