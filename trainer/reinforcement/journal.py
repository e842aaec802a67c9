"""Journal of a reinforcement learning: every step's answers and rewards, on the disk before they are trained on.

    <paths.reinforced>/rollouts/of.json        what the journal is of: keys that decide on its steps
                               /000001.json    all of step 1
                               /before.json    held-out answers of the policy that it began with

A training that was killed goes on from its last checkpoint. The steps behind that which stand here are trained on again
and are not sampled again. On a CPU they would come out the same; on a GPU they would not.
"""

import json
from pathlib import Path
from typing import Any

from conf.rules.reinforcement import contents
from conf.schema import identity
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically
from trainer.reinforcement.samples import Answer, Group, Step

FOLDER, OF = "rollouts", "of.json"
MADE_ANEW = "without it the step is made anew"
OWN = ("function", "environment", "judge_prompt")  # files of one's own, by their content


def facts(run: Run) -> dict[str, Any]:
    """The keys that decide on a run's steps, and digests of the files of one's own."""
    return identity.of(run, "reinforce")["reinforce"] | contents(run)


class Journal:
    def __init__(self, output: Path):
        self.folder = output / FOLDER

    def begin(self, facts: dict[str, Any]) -> None:
        """Begin or go on. Raises a Fault where what is there was made by other keys."""
        self.require(facts)
        path = self.folder / OF
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(facts), durable=True)

    def require(self, facts: dict[str, Any]) -> None:
        """Raise a Fault where what is there was made by other keys."""
        path = self.folder / OF
        if not path.exists():
            return
        before, plain = json_object.read(path), json.loads(json.dumps(facts))
        for key in sorted(before.keys() | plain.keys()):
            if key in OWN and key not in before:
                continue  # begun when they were not noted; one that is new has another reward, or more turns
            if before.get(key) != plain.get(key):
                was, now = json.dumps(before.get(key)), json.dumps(plain.get(key))
                raise Fault(
                    f"reinforce.{key}: {now}, but {self.folder} was begun with {was}; set it back to go on, or "
                    "name another paths.reinforced"
                )

    def write(self, step: Step) -> None:
        write_atomically(self._path(step.number), json.dumps(step, default=vars), durable=True)

    def read(self, number: int) -> Step | None:
        path = self._path(number)
        if not path.exists():
            return None
        try:
            step = _step(json_object.read(path))
            damage = _damage(step, number)
        except Fault as fault:
            raise Fault(f"{fault}; {MADE_ANEW}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise Fault(f"{path}: not what trainer.reinforce writes ({error!r}); {MADE_ANEW}") from None
        if damage:
            raise Fault(f"{path}: not what trainer.reinforce writes ({damage}); {MADE_ANEW}")
        return step

    def note(self, name: str, facts: dict[str, Any]) -> None:
        write_atomically(self.folder / f"{name}.json", json.dumps(facts), durable=True)

    def noted(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json_object.read(path) if path.exists() else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"


def _step(found: dict[str, Any]) -> Step:
    groups = [
        Group(group["row"], group["prompt"], [Answer(**answer) for answer in group["answers"]])
        for group in found["groups"]
    ]
    return Step(**{**found, "groups": groups})


def _damage(step: Step, number: int) -> str:
    """What of a step nothing could be learned from, or something wrong; empty where it is whole."""
    if step.number != number:
        return f"step {step.number}"
    for place, group in enumerate(step.groups, 1):
        if not group.prompt or not group.answers or not _are_tokens(group.prompt):
            return f"group {place} has no prompt or no answer"
        for answer in group.answers:
            told = [one for one in answer.log_probs if one is not None]
            if not _are_tokens(answer.tokens) or len(answer.log_probs) != len(answer.tokens):
                return f"an answer of group {place} has tokens that are none, or without log-probabilities"
            if not all(isinstance(value, float | int) for value in [*told, answer.reward]):
                return f"an answer of group {place} has a reward, or a log-probability, that is no number"
    if step.old and [len(one) for one in step.old] != [len(answer.tokens) for answer in step.answers]:
        return "the trainer's log-probabilities are of other answers"
    return "" if step.groups else "no groups"


def _are_tokens(found: list[int]) -> bool:
    return all(isinstance(token, int) and token >= 0 for token in found)
