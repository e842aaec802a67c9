"""Lines of metrics.jsonl that an earlier attempt has written."""

import json
from pathlib import Path

from contract.files import write_atomically


def drop_after(path: Path, step: int) -> dict:
    """Keep the complete lines of steps up to this one: a killed process may leave later lines and half a line.

    Damaged lines are dropped. Returns the last kept line that counts skipped steps.
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
