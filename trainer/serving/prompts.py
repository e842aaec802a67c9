"""Rows for prompts in the training's format: read from prepared data, with the template recorded there."""

import json
from pathlib import Path

from conf.schema.run import Run
from contract import json_object, regular_files
from contract.faults import Fault
from trainer.data import prepared
from trainer.data.rows import Row
from trainer.data.tokens import templates, tokenizer
from trainer.data.tokens.templates import Template

RECORD = "template.json"


def template(run: Run, model: str) -> Template:
    """Template with the tokenizer of a model's folder, which must be the tokenizer that prepared the data."""
    return templates.from_record(record(run), tokenizer.load(Path(model), run.model.trust_remote_code))


def folder(run: Run) -> Path:
    """Return the folder of the prepared data. For handwritten rows it is checked, as it may have another run's data."""
    data, place = Path(run.paths.data), prepared.folder(run)
    if place == data:
        return place
    files = [file for source in prepared.load(place).sources for file in source.files]
    if {Path(file.path).resolve().parent for file in files} != {data.resolve()}:
        raise Fault(f"paths.data: {data}: not prepared: python -m trainer.prepare")
    return place


def record(run: Run) -> dict:
    path = folder(run) / RECORD
    if not regular_files.is_there(path):
        raise Fault(f"paths.data: {path.parent}: not prepared: no {RECORD}; python -m trainer.prepare")
    try:
        return json_object.read(path)
    except Fault as fault:
        raise Fault(f"{fault}; python -m trainer.prepare writes it again") from None


def read(path: Path, rows: int | None) -> list[Row]:
    """The first rows of training.jsonl, validation.jsonl or test.jsonl."""
    rows_read = []
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if len(rows_read) == rows:
                break
            rows_read.append(_row(line, f"{path}:{number}"))
    return rows_read


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        raise Fault(f"{place}: not a JSON object; python -m trainer.prepare writes it again") from None
    if isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("input", "output")):
        return row
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return row
    raise Fault(f"{place}: input or output missing, or not text; python -m trainer.prepare writes it again")


def is_task_file(task: str) -> bool:
    """Whether an evaluation task is the user's file, and not a name of an lm-eval task."""
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()
