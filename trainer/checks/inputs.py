"""Checks of a command's inputs on disk, without torch, before any rank is started: in a second, but for the data.

Each check raises a Fault of one line that names the file, what is wrong with it and what would be right.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from conf.model_facts import ModelFacts, facts_from_hf
from conf.model_files import config_json, quantization, weights
from conf.model_files.weights import Entry
from conf.planner import released_model, stage_needs
from conf.rules import objectives, packed_base, reinforcement, schedule
from conf.rules.conversion import obstacles, unwritable
from conf.rules.layout import problems
from conf.rules.reinforcement import as_training
from conf.rules.serving import is_apart
from conf.schema.run import Run
from contract import checkpoints, output_marks
from contract.amounts import unlike
from contract.faults import Fault
from contract.output_marks import PARTIAL, REFERENCE, REINFORCEMENT, TRAINING
from trainer.checks import adapters
from trainer.data import prepared, references
from trainer.data.tokens import tokenizer
from trainer.megatron.recipe import checkpoint_folder
from trainer.reinforcement import journal, rewards
from trainer.serving import agreement, held_out_texts, prompts, unmerged
from trainer.training import resume
from trainer.weights import released


def check_convert(run: Run) -> None:
    facts = check_model(run)
    if run.convert.to != "none":
        _check_space(Path(run.paths.base), _converted(run), "the converted model")
    _check_layout(run, facts)


def check_compare(run: Run) -> None:
    check_model(run)


def check_train(run: Run) -> Run:
    """Check what training reads. Returns the run with all its steps counted."""
    facts = check_model(run)
    _check_base(run, checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert"))
    _check_layout(run, facts)
    if run.model.adapter and not checkpoints.complete_steps(checkpoint_folder(run)):
        adapters.check(run)
    if not schedule.needs_data(run):
        run = schedule.resolved(run)
        resume.check(run, checkpoint_folder(run))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.output), TRAINING)
    if "RANK" not in os.environ:  # ranks find made what the process before them has made
        prepared.make(run)
    found = prepared.check(run)
    if schedule.needs_data(run):
        run = schedule.resolved(run, prepared.of_an_epoch(run, found))
        resume.check(run, checkpoint_folder(run))
    resume.check_data(run, checkpoint_folder(run))
    if refused := objectives.unfit(run, str(prepared.folder(run)), found.kind):
        raise Fault(refused)
    if objectives.has_reference(run):
        references.check(run)
    if run.train.batch_ramp and found.kind != "text":
        raise Fault("train.ramp_from: is for texts, whose batches are cut as they come; rows have whole ones; null")
    return run


def _check_base(run: Run, made: dict[str, Any]) -> None:
    """Check that what is to lie packed is of this release, and, packed once, in the format that training has."""
    if made.get("to") == "packed" and made.get("base") != run.model.base:
        text = f"holds weights in {made.get('base')}, and model.base is {run.model.base}"
        raise Fault(f"paths.base: {run.paths.base}: {text}; model.base={made.get('base')}, or convert again")
    if made.get("to") == "packed" and {*made.get("pack", packed_base.PARTS)} != {*packed_base.parts(run)}:
        packed = ", ".join(made.get("pack", packed_base.PARTS))
        text = f"holds {packed} packed, and model.pack is {', '.join(packed_base.parts(run))}"
        raise Fault(f"paths.base: {run.paths.base}: {text}; model.pack=[{packed}], or convert again")
    if packed_base.format_of(run) is None:
        return  # Megatron compares shapes; what packs or reads codes takes the part of a matrix that it is asked for
    if other := released.unlike(Path(run.paths.base), weights.tensors(Path(run.paths.model))):
        text = f"made from another release than paths.model, {run.paths.model}, by {len(other)} tensors"
        raise Fault(f"paths.base: {run.paths.base}: {text}: {released.enumerate_names(other)}; convert that one")


def check_reference(run: Run) -> None:
    """Check what is asked of the reference."""
    if not objectives.has_reference(run):
        raise Fault(f"train.objective: {run.train.objective} needs no reference model")
    facts, key, remedy = check_model(run), "paths.base", "python -m trainer.convert"
    asked = objectives.as_asked(run)
    if objectives.has_teacher(run):
        key = "paths.teacher_base"
        remedy += f" with paths.model={run.paths.teacher} paths.base={run.paths.teacher_base}"
        facts = _check_teacher(run, facts)
    checkpoints.require(Path(asked.paths.base), key, remedy)
    _check_layout(asked, facts, f"train.teacher: {run.paths.teacher}: " if objectives.has_teacher(run) else "")
    if objectives.has_starting_adapter(run):
        adapters.check(run)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.reference), REFERENCE)
    found = prepared.check(run)
    if refused := objectives.unfit(run, str(prepared.folder(run)), found.kind):
        raise Fault(refused)


def _check_teacher(run: Run, student: ModelFacts) -> ModelFacts:
    """Check that the teacher has as many tokens as the model. Returns its sizes."""
    facts = check_model(objectives.at_teacher(run), "paths.teacher")
    if refused := objectives.unlike(run, student, facts, run.paths.teacher):
        raise Fault(refused)
    return facts


def check_tokens(run: Run) -> None:
    """Check that the teacher's tokens are the model's. Call with Megatron imported: tokenizers alone hide torch."""
    model, teacher = Path(run.paths.model), Path(run.paths.teacher)
    own, other = (tokenizer.load(one, run.model.trust_remote_code).get_vocab() for one in (model, teacher))
    if own != other:
        token = next(iter(sorted(own.items() ^ other.items())))[0]
        raise Fault(f"train.teacher: {teacher}: another tokenizer than the model's: {json.dumps(token)} differs")


def check_reinforce(given: Run) -> None:
    """Check what reinforcement learning reads."""
    run = as_training(given)
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_layout(run, facts)
    if refused := reinforcement.unlike(given, facts):
        raise Fault(refused)
    if given.reinforce.start == "trained" and not checkpoints.complete_steps(checkpoint_folder(given)):
        raise Fault(
            f"{checkpoint_folder(given)}: no complete checkpoint to begin with; python -m trainer.train makes one, and "
            "reinforce.start=base needs none"
        )
    if given.reinforce.source and not (Path(run.paths.data) / prepared.MANIFEST).exists():
        made = f"python -m trainer.prepare CONF data.source={given.reinforce.source} paths.data={run.paths.data}"
        raise Fault(f"paths.prompts: {run.paths.data}: not prepared; {made}")
    journal.Journal(Path(run.paths.output)).require(journal.facts(given))  # by its own keys, before those of a training
    resume.check(run, checkpoint_folder(run))
    if "RANK" not in os.environ or ("GANG_ATTEMPT" in os.environ and os.environ["RANK"] == "0"):
        rewards.check(run)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.output), REINFORCEMENT)
    if "RANK" not in os.environ:
        prepared.make(run)
    # A step asks as many prompts as it wants, the same ones again where there are fewer.
    train = run.train.model_copy(update={"global_batch": 1})
    found = prepared.check(run.model_copy(update={"train": train}))
    if refused := reinforcement.unfit(given, str(prepared.folder(run)), found.kind):
        raise Fault(refused)
    resume.check_data(run, checkpoint_folder(run))


def check_export(run: Run) -> None:
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    if refused := unwritable(config_json.read(Path(run.paths.model) / config_json.NAME), run.export.quantization):
        raise Fault(refused)
    if "merged" in (run.export.formats or ("merged",)):
        _check_space(Path(run.paths.export), quantization.size(*_described(run)), "the exported model")
    _check_layout(run, facts)


def check_evaluate(run: Run) -> None:
    folder, tasks = unmerged.model(run), run.evaluate.tasks
    if not folder.is_dir():
        key, maker = ("model", "the released checkpoint") if unmerged.is_configured(run) else ("served", "a model")
        made = "" if unmerged.is_configured(run) else " (trainer.export)"
        raise Fault(f"paths.{key}: {folder}: no such folder; it holds {maker} in Hugging Face format{made}")
    if not tasks:
        raise Fault("evaluate.tasks: empty; held_out is the data's test split")
    released_model.check(folder)
    unmerged.find(run)
    trained, _ = agreement.expected(run)
    if trained and is_apart(run):
        agreement.read_base(run, [row["tokens"] for row in trained["rows"]])
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not prompts.is_task_file(name):
            raise Fault(f"evaluate.tasks: {name}: no such file in {Path.cwd()}")
    if "held_out" in tasks and (Path(run.paths.data) / prepared.MANIFEST).exists() and held_out_texts.are_prepared(run):
        held_out_texts.require(run)
        prepared.check_questions(prompts.folder(run))
    elif "held_out" in tasks:
        file = Path(run.paths.data) / "test.jsonl"
        if not file.exists() or not file.stat().st_size:
            what = "empty" if file.exists() else "no such file"
            raise Fault(f"{file}: {what}; a larger share of data.test, or evaluate.tasks without held_out, would do")
        prompts.record(run)  # is there
        prepared.check_questions(prompts.folder(run))


def check_model(run: Run, key: str = "paths.model") -> ModelFacts:
    """Check that the released checkpoint is whole, and is converted to what config.json says. Returns its sizes.

    `key` is the one that names its folder.
    """
    folder = Path(run.paths.model)
    if not folder.is_dir():
        raise Fault(f"{key}: {folder}: no such folder; it holds the released checkpoint in Hugging Face format")
    config, facts = released_model.check_released(folder)
    if found := obstacles(config, run.model.ignore_config):
        raise Fault("\n".join(f"{folder}: {line}" for line in found))
    return facts


def _check_layout(run: Run, facts: ModelFacts, whose: str = "") -> None:
    if found := problems(run, facts):
        raise Fault("\n".join(f"{whose}{line}" for line in found))


def _converted(run: Run) -> int:
    """Bytes of the converted model."""
    config, tensors = _described(run)
    if run.convert.to == "packed":
        return stage_needs.converted(run, facts_from_hf(config))
    byte = 4 if run.train.precision == "fp32" else 2
    return quantization.parameters(config, tensors) * byte


def _described(run: Run) -> tuple[dict[str, Any], dict[str, Entry]]:
    model = Path(run.paths.model)
    return config_json.read(model / config_json.NAME), weights.tensors(model)


def _check_space(folder: Path, needed: int, what: str) -> None:
    place = Path(os.path.realpath(folder))
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    # What an attempt has left is gone on with, or goes.
    begun = place.with_name(place.name + PARTIAL)
    left = sum(path.stat().st_blocks * 512 for path in begun.rglob("*") if path.is_file()) if begun.is_dir() else 0
    free = shutil.disk_usage(existing).free + left
    if free < needed:
        wanted, there = unlike(needed, free)
        raise Fault(f"{folder}: {what} needs {wanted} and {there} are free there")
