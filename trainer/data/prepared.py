"""Prepared data (from trainer.prepare): the folder of a run's data, and checks that the data are complete and fit.

prepared.json, written last, lists every file with its SHA-256, the settings, the tokenizer, and the sources' files.
check() reads all of them again, at 1.5 GB/s, and reports changes in one line. Rows written by hand (a folder with
training.jsonl and no prepared.json) are prepared when training starts, into paths.output/data; nothing is written to
paths.data.

Not detected: a file added to a source folder, and changes of sources on the Hub or in an object store.
"""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from conf.error_lines import key_of
from conf.rules import objectives, schedule
from conf.rules.sequences import lacking
from conf.schema import bearing, identity
from conf.schema.run import Run
from contract import checkpoints, checksums, json_object, regular_files
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.data.preparation import MANIFEST, prepare_splits
from trainer.data.read import choose, sources
from trainer.data.tokens import tokenizer
from trainer.data.write import packing
from trainer.startup.entry import FAULT_FILE

QUESTION_FILES = ("test.jsonl", "test.bin", "test.idx", "template.json")
AGAIN = "python -m trainer.prepare writes it again"


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class State(Record):
    """State of a file."""

    size: int
    sha256: Text


class File(State):
    path: Text


class Source(Record):
    files: list[File] = []
    given_split: int | None = None  # index of the split, if the whole source is one split


class Prepared(Record):
    kind: Text  # "sft": token files of rows; "text": megatron-core's indexed data sets
    files: dict[Text, State]  # by name
    settings: dict[str, Any]  # keys of data, and the packing multiple
    sources: list[Source]
    tokenizer: Text
    rows: dict[str, int]  # by split
    sequences: dict[str, int]
    vocab_size: int
    pad_id: int

    @field_validator("rows", "sequences")
    @classmethod
    def _of_all_splits(cls, counts: dict[str, int]) -> dict[str, int]:
        if lacking_splits := [name for name in choose.SPLITS if name not in counts]:
            raise ValueError(f"{lacking_splits[0]} is missing")
        return counts

    def of_split(self, name: str) -> list[File]:
        """Return the files of rows that were written by hand for a split."""
        return [file for part in self.sources if part.given_split == choose.SPLITS.index(name) for file in part.files]


def folder(run: Run) -> Path:
    """Return the folder of a run's prepared data: paths.data, or the folder prepared from rows written by hand."""
    source = Path(run.paths.data)
    return source if (source / MANIFEST).exists() else Path(run.paths.output) / "data"


def make(run: Run) -> None:
    """Prepare rows written by hand, if not done yet. Other data are not prepared here."""
    source = Path(run.paths.data)
    if (source / MANIFEST).exists():
        return
    rows = source / "training.jsonl"
    if not rows.exists():
        raise Fault(
            f"paths.data: {source}: neither {MANIFEST} (python -m trainer.prepare writes it) nor {rows.name}, "
            "with one JSON object per line"
        )
    if steps := checkpoints.complete_steps(Path(run.paths.output) / "checkpoints"):
        _require_the_same(run, source, steps[-1])
    # In a separate process: preparation loads transformers without torch, which training could not use afterwards.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent) as process:
        process.submit(prepare_splits, run, source, folder(run)).result()


def _require_the_same(run: Run, source: Path, step: int) -> None:
    """Raise a Fault if rows written by hand have changed since checkpoints were trained on them.

    If the data prepared from them are gone, nothing can be compared.
    """
    place = folder(run)
    if not (place / MANIFEST).exists():
        return
    recorded = load(place)
    for name in choose.SPLITS:
        files = recorded.of_split(name)
        path = source / f"{name}.jsonl"
        if path.exists() and not files:
            change = "was added"
        elif files and (changed := _changed({path: files[0]})):
            change = changed[1]
        else:
            continue
        raise Fault(
            f"{path}: {change} since step {step} in {run.paths.output} was trained on it; restore it to resume, "
            "or train on these rows with another paths.output"
        )
    _check_settings(place, recorded, run, f"set it back to resume from step {step}, or set another paths.output")


def check_questions(place: Path) -> None:
    """Check that the evaluation's prompts, and rows written by hand, are unchanged since the preparation."""
    recorded = load(place)
    if changed := _changed({place / name: state for name, state in recorded.files.items() if name in QUESTION_FILES}):
        raise Fault(f"{changed[0]}: {changed[1]} since it was prepared; {AGAIN}; evaluation prompts must not be edited")
    by_hand = {Path(file.path): file for file in recorded.of_split("test")}
    if changed := _changed({path: file for path, file in by_hand.items() if path.exists()}):
        raise Fault(
            f"{changed[0]}: was edited after its preparation into {place}; restore it, "
            "or train and evaluate with these rows and another paths.output"
        )


def load(folder: Path) -> Prepared:
    path = folder / MANIFEST
    if not regular_files.is_there(path):
        raise Fault(f"paths.data: {folder}: no {MANIFEST}; python -m trainer.prepare writes it")
    try:
        return Prepared.model_validate(json_object.read(path))
    except ValidationError as error:
        detail = error.errors()[0]
        problem = f"{key_of(detail)}: {detail['msg']}"
    except Fault as fault:
        problem = str(fault)
    raise Fault(f"{path}: not a file of trainer.prepare ({problem}); {AGAIN}")


def check(run: Run) -> Prepared:
    place = folder(run)
    data = load(place)
    _check_files(place, data)
    _check_settings(place, data, run)
    _check_tokenizer(place, data, run)
    _check_sources(place, data, run)
    if problem := lacking(run, str(place), data.kind, data.rows, data.sequences):
        raise Fault(problem)
    return data


def of_an_epoch(run: Run, data: Prepared) -> int:
    """Return the number of training sequences of one epoch."""
    tokens = 0
    if data.kind == "text":
        tokens = json_object.read(folder(run) / "report.json")["tokens"]["training"]["tokens"]
    return schedule.sequences(run, data.kind, data.sequences["training"], tokens)


def fill(run: Run) -> float:
    """Return the share of positions in training sequences that hold tokens, not padding. Texts have no padding."""
    data = load(folder(run))
    if data.kind == "text":
        return 1.0
    counted = json_object.read(folder(run) / "report.json")["tokens"]["training"]
    each = objectives.sequences(run.train)
    positions = data.sequences["training"] * each * run.data.seq_length
    return (counted["tokens"] - counted["rows"] * each) / positions  # the last token of a row is only a label


def _check_files(place: Path, data: Prepared) -> None:
    if changed := _changed({place / name: state for name, state in data.files.items()}):
        raise Fault(f"{changed[0]}: {changed[1]} since it was prepared; {AGAIN}")


def _check_sources(place: Path, data: Prepared, run: Run) -> None:
    for number, source in enumerate(data.sources):
        files_now = _sources_now(run, number) if source.given_split is None else []
        if files_now and len(files_now) != len(source.files):
            raise Fault(f"data.source: {run.data.parts[number].source}: its files are not the prepared ones; {AGAIN}")
        files_now = files_now or [Path(file.path) for file in source.files]
        pairs = zip(files_now, source.files, strict=True)
        if changed := _changed({path: file for path, file in pairs if path.exists()}):
            raise Fault(f"{changed[0]}: was edited after its preparation into {place}; {AGAIN}")


def _sources_now(run: Run, number: int) -> list[Path]:
    """Return the current files of a source of this run; none if the source does not exist on this host."""
    source = run.data.parts[number].source if number < len(run.data.parts) else None
    try:
        return sources.files(source) if source and sources.is_local(source) else []
    except Fault:
        return []


def _changed(files: dict[Path, State]) -> tuple[Path, str] | None:
    """Return the first file that differs from its recorded state, and a text on the change; None if all are equal."""
    for path, state in files.items():
        if not path.is_file():
            return path, "gone"
        if path.stat().st_size != state.size:
            return path, f"changed from {state.size} to {path.stat().st_size} bytes"
    if FAULT_FILE in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":
        return None  # the process that started this rank, or the first rank of this host, reads the files
    with ThreadPoolExecutor() as pool:
        digests = zip(files, pool.map(checksums.of_file, files), strict=True)
        return next(((path, "changed") for path, digest in digests if digest != files[path].sha256), None)


def _check_settings(place: Path, data: Prepared, run: Run, remedy: str = "") -> None:
    current = run.data.model_dump(mode="json")
    compared = data.settings.keys() & current.keys() - {"mixture"}  # its files are compared instead, under any name
    if not run.data.packed:
        compared -= {"seed"}  # decides only which rows share a sequence; training draws their order
    if run.data.template.endswith(".jinja"):
        compared -= {"template"}  # its content is compared instead
        if checksums.of_file(Path(run.data.template)) != data.settings.get("template_file"):
            raise Fault(f"{run.data.template}: not the template that {place} was prepared with; {remedy or AGAIN}")
    unrecorded = identity.of_section(run.data, "prepare").keys() - data.settings.keys()  # absent keys
    settings = data.settings | {key: bearing.of(type(run.data).model_fields[key]).absent for key in unrecorded}
    for key in sorted(compared | {key for key in unrecorded if settings[key] is not bearing.ALWAYS}):
        if current[key] != settings[key]:
            raise Fault(
                f"data.{key}: {json.dumps(current[key])}, but {place} was prepared with {json.dumps(settings[key])}; "
                f"{remedy or f'{AGAIN}, or set data.{key} back'}"
            )
    if not run.data.packed or data.kind == "text":
        return
    needed, prepared_for = packing.multiple(run), data.settings.get("multiple", 0)
    if not isinstance(prepared_for, int) or not prepared_for or prepared_for % needed:
        raise Fault(
            f"layout: cp {run.layout.cp}, tp {run.layout.tp} and sp {json.dumps(run.layout.sp)} need packed rows whose "
            f"length is a multiple of {needed}, but {place} has multiples of {prepared_for}; {remedy or AGAIN}"
        )


def _check_tokenizer(place: Path, data: Prepared, run: Run) -> None:
    if tokenizer.digest(Path(run.paths.model)) != data.tokenizer:
        raise Fault(
            f"paths.model: {run.paths.model}: not the tokenizer that {place} was prepared with; {AGAIN}, "
            "or use the model of the preparation"
        )
