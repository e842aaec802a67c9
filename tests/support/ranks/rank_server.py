"""Server that reads requests, one line of JSON each, and runs trainer commands on forked ranks. See conftest.ranks."""

import gc
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from conf.schema.run import Run
from trainer.rehearsal import forked_ranks

# What the commands import once they run: each of hundreds of ranks would import it anew.
OF_COMMANDS = (
    "trainer.megatron.sequences",
    "trainer.objectives.sft",
    "trainer.objectives.dpo",
    "trainer.objectives.distill",
    "trainer.patches.resharding",
    "trainer.training.learning_check",
    "trainer.training.loss_scaling",
    "trainer.training.mark_checkpoints",
    "trainer.training.metrics",
    "trainer.training.packing_cost",
    "trainer.training.parity",
    "trainer.training.validations",
    "trainer.training.weight_means",
    "trainer.weights.starting_adapter",
)


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr
    forked_ranks.import_all()
    for name in OF_COMMANDS:
        importlib.import_module(name)
    gc.freeze()  # what was imported: no rank looks through it again
    for line in sys.stdin:
        request = json.loads(line)
        run = Run.model_validate_json(json.dumps(request["run"]))
        command = _command(request["command"])
        code = forked_ranks.call(command, run, Path(request["log"]), _reached(run, request["kill_at"]))
        replies.write(json.dumps(code) + "\n")
        replies.flush()


def _command(name: str):
    """Find main() of a script beside this one, or of the trainer's module of that name."""
    script = Path(__file__).with_name(f"{name}.py")
    if not script.exists():
        found = importlib.import_module(f"trainer.{name}")
        return (importlib.import_module(f"{found.__name__}.__main__") if hasattr(found, "__path__") else found).main
    spec = importlib.util.spec_from_file_location(name, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def _reached(run: Run, step: int | None):
    path = Path(run.paths.output) / "metrics.jsonl"

    def reached() -> bool:
        if step is None or not path.exists():
            return False
        return any(json.loads(line)["step"] >= step for line in path.read_text().splitlines() if '"train"' in line)

    return reached


if __name__ == "__main__":
    main()
