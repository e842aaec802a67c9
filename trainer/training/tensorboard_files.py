"""TensorBoard files of a run, in <paths.output>/tensorboard: the numbers of metrics.jsonl as curves."""

from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class TensorBoardFiles:
    """Writer for a training that resumes from step `start`. TensorBoard drops the earlier values of later steps."""

    def __init__(self, output: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(output / FOLDER), purge_step=start + 1, flush_secs=10)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl: lm_loss of a line of kind validation becomes the curve validation/lm_loss."""
        if line["kind"] == "start" or "step" not in line:
            return
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                self.writer.add_scalar(f"{line['kind']}/{name}", value, line["step"], line.get("time"))
        if line["kind"] != "train":
            self.writer.flush()  # a resumed run does not write earlier steps again, and the process may end any time
