"""Rehearsal of a run's layout: Megatron's own verdict, from trainer/rehearse.py in a separate process."""

import json
import tempfile
from pathlib import Path
from typing import Any

from conf.load import dump
from conf.schema.run import Run
from tasks.run import launch


def rehearse(run: Run, steps: int = 0) -> dict[str, Any]:
    """Run the rehearsal and return its answer.

    Raises a Fault for an error of the user, and Broken if the command itself fails.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        resolved = Path(name) / "run.yaml"
        dump(run, resolved)
        command = ["trainer.rehearse", str(resolved), "--json", "--steps", str(steps)]
        try:
            launch.process(command, Path(name) / "rehearse.log", said.append, stop=lambda: False)
        except launch.Broken:
            if "}" not in said:  # else the verdict is no
                raise
    return json.loads("\n".join(said[said.index("{") : said.index("}") + 1]))


def passed(answer: dict[str, Any]) -> bool:
    return answer["equal"] and not (answer["twin"] and answer["twin"]["failed"])
