"""Lines of metrics.jsonl that an attempt before this one has written."""

import json
from pathlib import Path

from contract.files import write_atomically


def drop_after(path: Path, step: int) -> dict:
    """Keep the whole lines of steps up to this one: a killed process may leave later ones, and half of the last.

    Of lines that are damaged nothing is kept. Returns the last line that is kept of those that count skipped steps.
    """
    kept, last = [], {}
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
            if found["step"] <= step and step:
                kept.append(line + "\n")
                last = found if "skipped_steps" in found else last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    write_atomically(path, "".join(kept), durable=True)
    return last
