"""Checks of a command's inputs on disk, without torch and before any rank starts. Only checks of data take over 1 s.

Each check raises a Fault of one line with the file, the problem and the remedy.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from conf.model_facts import ModelFacts, facts_from_hf
from conf.model_files import config_json, quantization, weights
from conf.planner import released_model, stage_needs
from conf.rules import objectives, packed_base, reinforcement, schedule, starting_adapter
from conf.rules.conversion import obstacles, unwritable
from conf.rules.layout import problems
from conf.rules.serving import is_apart
from conf.schema.run import Run
from contract import checkpoints, output_marks
from contract.amounts import unlike
from contract.faults import Fault
from trainer.data import prepared, references
from trainer.data.tokens import tokenizer
from trainer.megatron.recipe import checkpoint_folder
from trainer.reinforcement import journal, rewards
from trainer.serving import adapter_coverage, agreement, held_out, prompts, unmerged
from trainer.training import resume
from trainer.weights import released
from trainer.weights.exported import gguf_tokenizer


def check_convert(run: Run) -> None:
    facts = check_model(run)
    if run.convert.to != "none":
        _check_space(Path(run.paths.base), _converted(run), "the converted model")
    _check_layout(run, facts)


def check_compare(run: Run) -> None:
    check_model(run)


def check_train(run: Run) -> Run:
    """Check the inputs of training. Returns the run with the number of its steps."""
    facts = check_model(run)
    _check_base(run, checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert"))
    _check_layout(run, facts)
    resume.verify(checkpoint_folder(run))
    if run.model.adapter and not checkpoints.complete_steps(checkpoint_folder(run)):
        check_adapter(run)
    if not schedule.needs_data(run):
        run = schedule.resolved(run)
        resume.check(run, checkpoint_folder(run))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.output), output_marks.TRAINING)
    if "RANK" not in os.environ:  # for ranks, the process that started them has prepared the data
        prepared.make(run)
    data = prepared.check(run)
    if schedule.needs_data(run):
        run = schedule.resolved(run, prepared.of_an_epoch(run, data))
        resume.check(run, checkpoint_folder(run))
    resume.check_data(run, checkpoint_folder(run))
    _refuse(objectives.unfit(run, str(prepared.folder(run)), data.kind))
    if objectives.has_reference(run):
        references.check(run)
    if run.train.batch_ramp and data.kind != "text":
        raise Fault("train.ramp_from: only texts, whose batches can be cut anywhere, allow it; set it to null for rows")
    return run


def _check_base(run: Run, mark: dict[str, Any]) -> None:
    """Check that a base to pack was made from this release, and that a packed base has the run's format."""
    if mark.get("to") == "packed" and mark.get("base") != run.model.base:
        text = f"holds weights in {mark.get('base')}, but model.base is {run.model.base}"
        raise Fault(f"paths.base: {run.paths.base}: {text}; model.base={mark.get('base')}, or convert again")
    if mark.get("to") == "packed" and {*mark.get("pack", packed_base.PARTS)} != {*packed_base.parts(run)}:
        packed = ", ".join(mark.get("pack", packed_base.PARTS))
        text = f"holds {packed} packed, but model.pack is {', '.join(packed_base.parts(run))}"
        raise Fault(f"paths.base: {run.paths.base}: {text}; model.pack=[{packed}], or convert again")
    if packed_base.format_of(run) is None:
        return  # without packing, Megatron compares the shapes
    if other := released.unlike(Path(run.paths.base), weights.tensors(Path(run.paths.model))):
        text = f"made from another release than paths.model, {run.paths.model}: {len(other)} tensors differ"
        raise Fault(f"paths.base: {run.paths.base}: {text}: {released.enumerate_names(other)}; convert paths.model")


def check_reference(run: Run) -> None:
    """Check the inputs of the reference."""
    if not objectives.has_reference(run):
        raise Fault(f"train.objective: {run.train.objective} needs no reference model")
    facts, key, remedy = check_model(run), "paths.base", "python -m trainer.convert"
    scored = objectives.as_asked(run)
    if objectives.has_teacher(run):
        key = "paths.teacher_base"
        remedy += f" with paths.model={run.paths.teacher} paths.base={run.paths.teacher_base}"
        facts = _check_teacher(run, facts)
    checkpoints.require(Path(scored.paths.base), key, remedy)
    _check_layout(scored, facts, f"train.teacher: {run.paths.teacher}: " if objectives.has_teacher(run) else "")
    if objectives.has_starting_adapter(run):
        check_adapter(run)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.reference), output_marks.REFERENCE)
    data = prepared.check(run)
    _refuse(objectives.unfit(run, str(prepared.folder(run)), data.kind))


def _check_teacher(run: Run, student: ModelFacts) -> ModelFacts:
    """Check that the teacher has as many tokens as the model. Returns the teacher's sizes."""
    facts = check_model(objectives.at_teacher(run), "paths.teacher")
    _refuse(objectives.unlike(run, student, facts, run.paths.teacher))
    return facts


def check_tokens(run: Run) -> None:
    """Check that the teacher's tokens are the model's. Import Megatron first: loading tokenizers hides torch."""
    model, teacher = Path(run.paths.model), Path(run.paths.teacher)
    own, other = (tokenizer.load(path, run.model.trust_remote_code).get_vocab() for path in (model, teacher))
    if own != other:
        token = next(iter(sorted(own.items() ^ other.items())))[0]
        raise Fault(f"train.teacher: {teacher}: its tokenizer differs from the model's: {json.dumps(token)}")


def check_reinforce(configured: Run) -> None:
    """Check the inputs of reinforcement learning."""
    run = reinforcement.as_training(configured)
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_layout(run, facts)
    _refuse(reinforcement.unlike(configured, facts))
    if configured.reinforce.start == "trained" and not checkpoints.complete_steps(checkpoint_folder(configured)):
        raise Fault(
            f"{checkpoint_folder(configured)}: no complete checkpoint to start from; python -m trainer.train writes "
            "one, and reinforce.start=base needs none"
        )
    if configured.reinforce.source and not (Path(run.paths.data) / prepared.MANIFEST).exists():
        source = configured.reinforce.source
        command = f"python -m trainer.prepare CONF data.source={source} paths.data={run.paths.data}"
        raise Fault(f"paths.prompts: {run.paths.data}: not prepared; {command}")
    resume.verify(checkpoint_folder(run))
    # Checked before resume.check(), whose message would name the keys of a training.
    journal.Journal(Path(run.paths.output)).require(journal.facts(configured))
    resume.check(run, checkpoint_folder(run))
    if "RANK" not in os.environ or ("GANG_ATTEMPT" in os.environ and os.environ["RANK"] == "0"):
        rewards.check(run)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        output_marks.take(Path(run.paths.output), output_marks.REINFORCEMENT)
    if "RANK" not in os.environ:
        prepared.make(run)
    # Any number of prompts is enough: a step uses a prompt several times if there are too few.
    data = prepared.check(run.changed(train={"global_batch": 1}))
    _refuse(reinforcement.unfit(configured, str(prepared.folder(run)), data.kind))
    resume.check_data(run, checkpoint_folder(run))


def check_export(run: Run) -> None:
    facts = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _refuse(unwritable(config_json.read(Path(run.paths.model) / config_json.NAME), run.export))
    if run.export.gguf:
        gguf_tokenizer.check(Path(run.paths.model), run.export.gguf)
    if "merged" in (run.export.formats or ("merged",)):
        _check_space(Path(run.paths.export), quantization.size(*_described(run)), "the exported model")
    _check_layout(run, facts)


def check_evaluate(run: Run) -> None:
    folder, tasks = unmerged.model(run), run.evaluate.tasks
    if not folder.is_dir():
        content = "model: {}: no such folder; it holds the released checkpoint in Hugging Face format"
        if not unmerged.is_configured(run):
            content = "served: {}: no such folder; it holds a model in Hugging Face format (trainer.export)"
        raise Fault(f"paths.{content.format(folder)}")
    if not tasks:
        raise Fault("evaluate.tasks: empty; held_out is the data's test split")
    released_model.check(folder)
    if adapter := unmerged.find(run):
        adapter_coverage.require_whole(adapter.folder, folder)
    trained, _ = agreement.expected(run)
    if trained and is_apart(run):
        agreement.read_base(run, [row["tokens"] for row in trained["rows"]])
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not prompts.is_task_file(name):
            raise Fault(f"evaluate.tasks: {name}: no such file in {Path.cwd()}")
    if "held_out" in tasks and (Path(run.paths.data) / prepared.MANIFEST).exists() and held_out.has_texts(run):
        held_out.require_texts(run)
        prepared.check_questions(prompts.folder(run))
    elif "held_out" in tasks:
        file = Path(run.paths.data) / "test.jsonl"
        if not file.exists() or not file.stat().st_size:
            problem = "empty" if file.exists() else "no such file"
            raise Fault(f"{file}: {problem}; set a larger data.test, or evaluate.tasks without held_out")
        prompts.record(run)  # raises a Fault if it is missing
        prepared.check_questions(prompts.folder(run))


def check_model(run: Run, key: str = "paths.model") -> ModelFacts:
    """Check that the released checkpoint is complete, and that its config.json can be converted. Returns its sizes.

    `key` names its folder in messages.
    """
    folder = Path(run.paths.model)
    if not folder.is_dir():
        raise Fault(f"{key}: {folder}: no such folder; it holds the released checkpoint in Hugging Face format")
    config, facts = released_model.check_released(folder)
    _refuse("\n".join(f"{folder}: {line}" for line in obstacles(config, run.model.ignore_config)))
    return facts


def check_adapter(run: Run) -> None:
    """Raise a Fault if the adapter is missing, or this run's adapter cannot start from it."""
    starting_adapter.check(run, starting_adapter.read(run))


def _check_layout(run: Run, facts: ModelFacts, prefix: str = "") -> None:
    _refuse("\n".join(f"{prefix}{line}" for line in problems(run, facts)))


def _refuse(problem: str | None) -> None:
    if problem:
        raise Fault(problem)


def _converted(run: Run) -> int:
    """Return the bytes of the converted model."""
    config, tensors = _described(run)
    if run.convert.to == "packed":
        return stage_needs.converted(run, facts_from_hf(config))
    byte = 4 if run.train.precision == "fp32" else 2
    return quantization.parameters(config, tensors) * byte


def _described(run: Run) -> tuple[dict[str, Any], dict[str, weights.Entry]]:
    model = Path(run.paths.model)
    return config_json.read(model / config_json.NAME), weights.tensors(model)


def _check_space(folder: Path, needed: int, content: str) -> None:
    place = Path(os.path.realpath(folder))
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    # An earlier attempt's files count as free: the command continues with them or deletes them.
    partial = place.with_name(place.name + output_marks.PARTIAL)
    files = (path for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else ()
    free = shutil.disk_usage(existing).free + sum(path.stat().st_blocks * 512 for path in files)
    if free < needed:
        needed_text, free_text = unlike(needed, free)
        raise Fault(f"{folder}: {content} needs {needed_text} and {free_text} are free there")
