"""Rows with a chosen and a rejected answer, as a person would have them, for the tiny models."""

import json
from pathlib import Path

import pytest

from trainer.data.tickets import tickets, with_worse


@pytest.fixture(scope="session")
def compared(work, configure, base, ranks):
    """compared(model, name, *overrides) -> Run of dpo on tickets, whose reference has been asked.

    With ask=False nobody has been. One process answers for all runs of a model: whoever comes later finds it answered.
    """
    folder = work / "ranked"
    folder.mkdir()
    rows = [json.dumps(row) + "\n" for row in with_worse(tickets(320, seed=0), seed=0)]
    (folder / "training.jsonl").write_text("".join(rows[:250]))  # no multiple of any batch
    (folder / "validation.jsonl").write_text("".join(rows[250:]))

    def compared(model: str, name: str, *overrides: str, ask: bool = True):
        base(model)
        shared = ask and not any(one.startswith("layout.") for one in overrides)
        reference = work / f"{model if shared else name}-reference"
        paths = {"data": folder, "output": work / name, "reference": reference}
        given = [f"paths.{key}={path}" for key, path in paths.items()]
        run = configure(model, "train.objective=dpo", *given, *overrides)
        Path(run.paths.reference).mkdir(exist_ok=True)
        if not ask:
            return run
        result = ranks("reference", run)
        assert result.code == 0, result.output[-3000:]
        return run

    return compared
