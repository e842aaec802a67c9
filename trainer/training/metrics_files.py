"""Files of metrics: metrics.jsonl, and its numbers as curves of TensorBoard in the folder tensorboard next to it."""

import json
from pathlib import Path
from typing import Any

from contract.files import write_atomically

FOLDER = "tensorboard"


class MetricsFiles:
    """Writer for a training that resumes from step `start`. TensorBoard drops the earlier values of later steps."""

    def __init__(self, path: Path, start: int, tensorboard: bool):
        self.path, self.curves = path, None
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_skips = drop_after(path, start)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(str(path.parent / FOLDER), purge_step=start + 1, flush_secs=10)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. As curves, lm_loss of a line of kind validation is validation/lm_loss."""
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")
        if self.curves is None or line["kind"] == "start" or "step" not in line:
            return
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                self.curves.add_scalar(f"{line['kind']}/{name}", value, line["step"], line.get("time"))
        if line["kind"] != "train":
            self.curves.flush()  # a resumed run does not write earlier steps again, and the process may end any time


def drop_after(path: Path, step: int) -> dict:
    """Drop lines of later steps and damaged lines, which a killed process may have left.

    Return the last remaining line that counts skipped steps.
    """
    lines, last = [], {}
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            metrics = json.loads(line)
            if metrics["step"] <= step and step:
                lines.append(line + "\n")
                last = metrics if "skipped_steps" in metrics else last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    write_atomically(path, "".join(lines), durable=True)
    return last
