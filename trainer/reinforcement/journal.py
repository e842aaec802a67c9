"""Journal of reinforcement learning: every step's answers and rewards, written to disk before they are trained on.

    <paths.reinforced>/rollouts/of.json        keys of the run that decide its steps
                               /000001.json    all of step 1
                               /before.json    result of the initial policy on the held-out rows

If a training is killed, it resumes from its last checkpoint. Later steps in the journal are trained on again, without
sampling them again. Sampling again would give the same answers on a CPU, but not on a GPU.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from conf.error_lines import key_of
from conf.rules.reinforcement import contents
from conf.schema import identity
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically
from trainer.reinforcement.samples import Step

FOLDER, OF = "rollouts", "of.json"
STEP = TypeAdapter(Step)
ADVICE = "if you remove it, the step is sampled again"
OWN = ("function", "environment", "judge_prompt")  # files of the user, recorded by their content


def facts(run: Run) -> dict[str, Any]:
    """The keys that decide a run's steps, and digests of the user's files."""
    return identity.of(run, "reinforce")["reinforce"] | contents(run)


class Journal:
    def __init__(self, output: Path):
        self.folder = output / FOLDER

    def begin(self, facts: dict[str, Any]) -> None:
        """Begin or continue the journal. Raises a Fault if it was begun with other keys."""
        self.require(facts)
        path = self.folder / OF
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(facts), durable=True)

    def require(self, facts: dict[str, Any]) -> None:
        """Raise a Fault if the journal was begun with other keys."""
        path = self.folder / OF
        if not path.exists():
            return
        before, plain = json_object.read(path), json.loads(json.dumps(facts))
        for key in sorted(before.keys() | plain.keys()):
            if key in OWN and key not in before:
                continue  # the journal is older than this record; a new file would also change another key
            if before.get(key) != plain.get(key):
                was, now = json.dumps(before.get(key)), json.dumps(plain.get(key))
                raise Fault(
                    f"reinforce.{key}: {now}, but {self.folder} was begun with {was}; set it back to resume, or "
                    "name another paths.reinforced"
                )

    def write(self, step: Step) -> None:
        write_atomically(self._path(step.number), json.dumps(step, default=vars), durable=True)

    def read(self, number: int) -> Step | None:
        path = self._path(number)
        if not path.exists():
            return None
        try:
            step = STEP.validate_python(json_object.read(path))
        except ValidationError as error:
            first = error.errors()[0]
            raise _damaged(path, f"{key_of(first)}: {first['msg']}") from None
        except Fault as fault:
            raise Fault(f"{fault}; {ADVICE}") from None
        if damage := _damage(step, number):
            raise _damaged(path, damage)
        return step

    def note(self, name: str, facts: dict[str, Any]) -> None:
        write_atomically(self.folder / f"{name}.json", json.dumps(facts), durable=True)

    def noted(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json_object.read(path) if path.exists() else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"


def _damaged(path: Path, reason: str) -> Fault:
    return Fault(f"{path}: not what trainer.reinforce writes ({reason}); {ADVICE}")


def _damage(step: Step, number: int) -> str:
    """Return the reason why a step cannot be trained on, although its types are correct; empty if there is none."""
    if step.number != number:
        return f"step {step.number}"
    if any(len(answer.log_probs) != len(answer.tokens) for answer in step.answers):
        return "an answer has tokens without log-probabilities"
    if step.old and [len(values) for values in step.old] != [len(answer.tokens) for answer in step.answers]:
        return "the trainer's log-probabilities are of other answers"
    return ""
