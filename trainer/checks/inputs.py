"""What a command needs on disk, checked without torch before any rank is started: in a second, but for the data.

Each check raises a Fault of one line that names the file, what is wrong with it and what would be right.
"""

import os
import shutil
from pathlib import Path

from conf.amounts import unlike
from conf.conversion import obstacles
from conf.facts import ModelFacts
from conf.layout import problems
from conf.model_files import weights, whole
from conf.output_marks import TRAINING
from conf.schema import Run
from trainer import agreement, asked, checkpoints, places, prepared, resume
from trainer.faults import Fault
from trainer.recipe import checkpoint_folder


def check_convert(run: Run) -> None:
    facts = check_model(run)
    _check_space(Path(run.paths.base), run, "the converted model")
    _check_layout(run, facts)


def check_train(run: Run) -> None:
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_layout(run, facts)
    resume.check(run, checkpoint_folder(run))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        places.take(Path(run.paths.output), TRAINING)
    if "RANK" not in os.environ:  # ranks find made what the process before them has made
        prepared.make(run)
    prepared.check(run)
    resume.check_data(run, checkpoint_folder(run))


def check_export(run: Run) -> None:
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_space(Path(run.paths.export), run, "the exported model")
    _check_layout(run, facts)


def check_evaluate(run: Run) -> None:
    folder, tasks = Path(run.paths.served), run.evaluate.tasks
    if not folder.is_dir():
        raise Fault(f"paths.served: {folder}: no such folder; it holds a model in Hugging Face format (trainer.export)")
    if not tasks:
        raise Fault("evaluate.tasks: empty; held_out is the data's test split")
    whole.check(folder)
    agreement.expected(run)
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not is_file(name):
            raise Fault(f"evaluate.tasks: {name}: no such file in {Path.cwd()}")
    if "held_out" in tasks:
        file = Path(run.paths.data) / "test.jsonl"
        if not file.exists() or not file.stat().st_size:
            what = "empty" if file.exists() else "no such file"
            raise Fault(f"{file}: {what}; a larger share of data.test, or evaluate.tasks without held_out, would do")
        asked.record(run)  # is there
        prepared.check_asked(asked.folder(run))


def is_file(task: str) -> bool:
    """Whether an evaluation task is a file of one's own, not a name that lm-eval knows."""
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


def check_model(run: Run) -> ModelFacts:
    """The released checkpoint is whole, and is converted to what config.json says. Returns its sizes."""
    folder = Path(run.paths.model)
    if not folder.is_dir():
        raise Fault(f"paths.model: {folder}: no such folder; it holds the released checkpoint in Hugging Face format")
    config, facts = whole.check_released(folder)
    if found := obstacles(config, run.model.ignore_config):
        raise Fault("\n".join(f"{folder}: {line}" for line in found))
    return facts


def _check_layout(run: Run, facts: ModelFacts) -> None:
    if found := problems(run, facts):
        raise Fault("\n".join(found))


def _check_space(folder: Path, run: Run, what: str) -> None:
    needed = weights.size(Path(run.paths.model))  # as large as the released model
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        wanted, left = unlike(needed, free)
        raise Fault(f"{folder}: {what} needs {wanted} and {left} are free there")
