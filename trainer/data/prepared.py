"""Prepared data (trainer.prepare): their folder for a run, and checks that they are complete and fit the run.

prepared.json, written last, lists every file with its SHA-256, the settings, the tokenizer, and the sources' files.
check() reads all of them again, at 1.5 GB/s, and reports changes in one line. Rows written by hand (a folder with
training.jsonl and no prepared.json) are prepared when training starts, into paths.output/data; nothing is written to
paths.data.

Not detected: a file added to a source folder, and changes of sources on the Hub or in an object store.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conf.rules import objectives, schedule
from conf.rules.sequences import lacking
from conf.schema import bearing, identity
from conf.schema.run import Run
from contract import checkpoints, checksums, json_object, regular_files
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.data import preparation
from trainer.data.identity import MANIFEST
from trainer.data.read import choose, sources
from trainer.data.tokens import tokenizer
from trainer.data.write import packing
from trainer.startup.entry import FAULT_FILE

QUESTION_FILES = ("test.jsonl", "test.bin", "test.idx", "template.json")
AGAIN = "python -m trainer.prepare writes it again"


@dataclass(frozen=True)
class Prepared:
    kind: str  # "sft": token files of rows; "text": megatron-core's indexed data sets
    files: dict[str, dict[str, Any]]  # size and sha256, by name
    settings: dict[str, Any]  # keys of data, and the packing multiple
    sources: list[dict[str, Any]]
    tokenizer: str
    rows: dict[str, int]  # by split
    sequences: dict[str, int]
    vocab_size: int
    pad_id: int


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
        process.submit(preparation.prepare_splits, run, source, folder(run)).result()


def _require_the_same(run: Run, source: Path, step: int) -> None:
    """Raise a Fault if rows written by hand have changed since checkpoints were trained on them.

    If the data prepared from them are gone, nothing can be compared.
    """
    place = folder(run)
    if not (place / MANIFEST).exists():
        return
    recorded = load(place)
    for number, name in enumerate(choose.SPLITS):
        entries = [file for part in recorded.sources if part.get("given_split") == number for file in part["files"]]
        path = source / f"{name}.jsonl"
        if path.exists() and not entries:
            change = "was added"
        elif entries and (changed := next(_changed([{**entries[0], "path": path}]), None)):
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
    entries = [{"path": place / name, **recorded.files[name]} for name in QUESTION_FILES if name in recorded.files]
    if changed := next(_changed(entries), None):
        raise Fault(f"{changed[0]}: {changed[1]} since it was prepared; {AGAIN}; evaluation prompts must not be edited")
    test = choose.SPLITS.index("test")
    by_hand = [file for source in recorded.sources if source.get("given_split") == test for file in source["files"]]
    existing = [{**file, "path": Path(file["path"])} for file in by_hand if Path(file["path"]).exists()]
    if changed := next(_changed(existing), None):
        raise Fault(
            f"{changed[0]}: was edited after its preparation into {place}; restore it, "
            "or train and evaluate with these rows and another paths.output"
        )


def load(folder: Path) -> Prepared:
    path = folder / MANIFEST
    try:
        record = json_object.read(path)
        return _structured(Prepared(**{field.name: record[field.name] for field in fields(Prepared)}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if not regular_files.is_there(path):
            raise Fault(f"paths.data: {folder}: no {MANIFEST}; python -m trainer.prepare writes it") from None
        raise Fault(f"{path}: not a file of trainer.prepare ({type(error).__name__}: {error}); {AGAIN}") from None


def _structured(record: Prepared) -> Prepared:
    """Return the record after checking the type of every value. Raise a TypeError or KeyError otherwise."""
    sources = [file for source in record.sources for file in source.get("files") or []]
    paths = [*record.files, *(file["path"] for file in sources)]
    entries = [*record.files.values(), *sources]
    digests = [record.tokenizer, *(entry["sha256"] for entry in entries)]
    counts = [*(entry["size"] for entry in entries), *record.rows.values(), *record.sequences.values()]
    counts += [
        record.settings.get("multiple", 0),
        record.vocab_size,
        record.pad_id,
        record.sequences["training"],
        record.sequences["validation"],
    ]
    if not all(isinstance(text, str) and "\0" not in text for text in (record.kind, *paths, *digests)):
        raise TypeError("a path or a digest is not a string")
    if not all(type(count) is int for count in counts) or not isinstance(record.settings, dict):
        raise TypeError("a count is not an integer, or settings are not an object")
    return record


def check(run: Run) -> Prepared:
    place = folder(run)
    data = load(place)
    _check_files(place, data)
    _check_settings(place, data, run)
    _check_tokenizer(place, data, run)
    _check_sources(place, data, run)
    _check_sizes(place, data, run)
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
    changed = next(_changed([{"path": place / name, **entry} for name, entry in data.files.items()]), None)
    if changed:
        path, change = changed
        raise Fault(f"{path}: {change} since it was prepared; {AGAIN}")


def _check_sources(place: Path, data: Prepared, run: Run) -> None:
    for number, source in enumerate(data.sources):
        entries = source.get("files") or []
        files_now = _sources_now(run, number) if source.get("given_split") is None else []
        if files_now and len(files_now) != len(entries):
            raise Fault(f"data.source: {run.data.parts[number].source}: its files are not the prepared ones; {AGAIN}")
        files_now = files_now or [Path(entry["path"]) for entry in entries]
        pairs = zip(files_now, entries, strict=True)
        if changed := next(_changed([entry | {"path": path} for path, entry in pairs if path.exists()]), None):
            raise Fault(f"{changed[0]}: was edited after its preparation into {place}; {AGAIN}")


def _sources_now(run: Run, number: int) -> list[Path]:
    """Return the current files of the run's own source, wherever it is; none if it does not exist here."""
    source = run.data.parts[number].source if number < len(run.data.parts) else None
    try:
        return sources.files(source) if source and sources.is_local(source) else []
    except Fault:
        return []


def _changed(entries: list[dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yield files that have changed, and how."""
    for entry in entries:
        path: Path = entry["path"]
        if not path.is_file():
            yield path, "gone"
        elif path.stat().st_size != entry["size"]:
            yield path, f"changed from {entry['size']} to {path.stat().st_size} bytes"
    if FAULT_FILE in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":
        return  # the starter of this rank has read them already, or the first rank of this host does
    with ThreadPoolExecutor() as pool:
        digests = pool.map(checksums.of_file, [entry["path"] for entry in entries])
        yield from ((e["path"], "changed") for e, now in zip(entries, digests, strict=True) if now != e["sha256"])


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
    if not prepared_for or prepared_for % needed:
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


def _check_sizes(place: Path, data: Prepared, run: Run) -> None:
    if problem := lacking(run, str(place), data.kind, data.rows, data.sequences):
        raise Fault(problem)
