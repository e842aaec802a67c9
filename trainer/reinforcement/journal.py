"""Journal of a reinforcement learning: every step's answers and rewards, on the disk before they are trained on.

    <paths.reinforced>/rollouts/of.json        what the journal is of: keys that decide on its steps
                               /000001.json    all of step 1
                               /before.json    held-out answers of the policy that it began with

A training that was killed goes on from its last checkpoint. The steps behind that which stand here are trained on again
and are not sampled again. On a CPU they would come out the same; on a GPU they would not.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically
from trainer.reinforcement.samples import Answer, Group, Step

FOLDER, OF = "rollouts", "of.json"
OWN = ("function", "environment", "judge_prompt")  # files of one's own, by their content


class Journal:
    def __init__(self, output: Path):
        self.folder = output / FOLDER

    def begin(self, facts: dict[str, Any]) -> None:
        """Begin or go on. Raises a Fault where what is there was made by other keys."""
        path = self.folder / OF
        plain = json.loads(json.dumps(facts))
        if path.exists():
            before = json_object.read(path)
            for key in sorted(before.keys() | plain.keys()):
                if key in OWN and key not in before:
                    continue  # begun when they were not noted; one that is new has another reward, or more turns
                if before.get(key) != plain.get(key):
                    was, now = json.dumps(before.get(key)), json.dumps(plain.get(key))
                    raise Fault(
                        f"reinforce.{key}: {now}, but {self.folder} was begun with {was}; set it back to go on, or "
                        "name another paths.reinforced"
                    )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain), durable=True)

    def write(self, step: Step) -> None:
        write_atomically(self._path(step.number), json.dumps(asdict(step)), durable=True)

    def read(self, number: int) -> Step | None:
        path = self._path(number)
        if not path.exists():
            return None
        found = json_object.read(path)
        try:
            groups = [
                Group(group["row"], group["prompt"], [Answer(**answer) for answer in group["answers"]])
                for group in found["groups"]
            ]
            return Step(**{**found, "groups": groups})
        except (KeyError, TypeError) as error:
            raise Fault(
                f"{path}: not what trainer.reinforce writes ({error!r}); without it the step is made anew"
            ) from None

    def note(self, name: str, facts: dict[str, Any]) -> None:
        write_atomically(self.folder / f"{name}.json", json.dumps(facts), durable=True)

    def noted(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json_object.read(path) if path.exists() else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"
