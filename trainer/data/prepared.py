"""Prepared data (trainer.prepare): their place for a run, and whether they are whole and fit the run.

prepared.json, written last, lists every file with its SHA-256, the settings, the tokenizer, and the sources' files.
check() reads all of them again, at 1.5 GB/s, and says in one line what has been changed since. Rows made by hand, a
folder with training.jsonl and no prepared.json, are prepared when training starts, into paths.output/data: paths.data
itself is never written to.

Not noticed: a file added to a folder that is a source, and sources on the Hub or in an object store.
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

ASKED = ("test.jsonl", "test.bin", "test.idx", "template.json")
AGAIN = "python -m trainer.prepare makes it again"


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
    """Folder of a run's prepared data: paths.data, or the folder that is made of rows by hand that lie there."""
    given = Path(run.paths.data)
    return given if (given / MANIFEST).exists() else Path(run.paths.output) / "data"


def make(run: Run) -> None:
    """Prepare rows made by hand, where that is not done yet. No other data are prepared here."""
    given = Path(run.paths.data)
    if (given / MANIFEST).exists():
        return
    rows = given / "training.jsonl"
    if not rows.exists():
        raise Fault(
            f"paths.data: {given}: neither {MANIFEST} (python -m trainer.prepare makes it) nor {rows.name}, "
            "with one JSON object a line"
        )
    if steps := checkpoints.complete_steps(Path(run.paths.output) / "checkpoints"):
        _require_the_same(run, given, steps[-1])
    # In a process of its own: tokenizers are loaded without torch, and transformers is of no use to training then.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent) as process:
        process.submit(preparation.given, run, given, folder(run)).result()


def _require_the_same(run: Run, given: Path, step: int) -> None:
    """Refuse rows made by hand that have changed since checkpoints have been trained on them.

    Where the data prepared from them are gone, there is nothing to compare with.
    """
    place = folder(run)
    if not (place / MANIFEST).exists():
        return
    found = load(place)
    for number, name in enumerate(choose.SPLITS):
        entries = [file for source in found.sources if source.get("given_split") == number for file in source["files"]]
        path = given / f"{name}.jsonl"
        if path.exists() and not entries:
            how = "was added"
        elif entries and (changed := next(_changed([{**entries[0], "path": path}]), None)):
            how = changed[1]
        else:
            continue
        raise Fault(
            f"{path}: {how} since step {step} in {run.paths.output} was trained on what it held; put it back to go on, "
            "or train on these rows in another paths.output"
        )
    _check_settings(place, found, run, f"set it back to go on from step {step}, or name another paths.output")


def check_asked(place: Path) -> None:
    """Check that the prompts for evaluation are as prepared, and that rows made by hand are as they were then."""
    found = load(place)
    entries = [{"path": place / name, **found.files[name]} for name in ASKED if name in found.files]
    if changed := next(_changed(entries), None):
        raise Fault(f"{changed[0]}: {changed[1]} since it was prepared; {AGAIN}, and questions are never to be edited")
    test = choose.SPLITS.index("test")
    by_hand = [file for source in found.sources if source.get("given_split") == test for file in source["files"]]
    there = [{**file, "path": Path(file["path"])} for file in by_hand if Path(file["path"]).exists()]
    if changed := next(_changed(there), None):
        raise Fault(
            f"{changed[0]}: was edited after its preparation into {place}; put it back, "
            "or train and evaluate with these rows in another paths.output"
        )


def load(folder: Path) -> Prepared:
    path = folder / MANIFEST
    try:
        found = json_object.read(path)
        return _structured(Prepared(**{field.name: found[field.name] for field in fields(Prepared)}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if not regular_files.is_there(path):
            raise Fault(f"paths.data: {folder}: no {MANIFEST}; python -m trainer.prepare makes it") from None
        raise Fault(f"{path}: not what trainer.prepare writes ({type(error).__name__}: {error}); {AGAIN}") from None


def _structured(found: Prepared) -> Prepared:
    """The record, once every value is of the type that is written. Raises where one is of another type."""
    sources = [file for source in found.sources for file in source.get("files") or []]
    paths = [*found.files, *(file["path"] for file in sources)]
    entries = [*found.files.values(), *sources]
    digests = [found.tokenizer, *(entry["sha256"] for entry in entries)]
    counts = [*(entry["size"] for entry in entries), *found.rows.values(), *found.sequences.values()]
    counts += [
        found.settings.get("multiple", 0),
        found.vocab_size,
        found.pad_id,
        found.sequences["training"],
        found.sequences["validation"],
    ]
    if not all(isinstance(text, str) and "\0" not in text for text in (found.kind, *paths, *digests)):
        raise TypeError("a path or a digest is no text")
    if not all(type(count) is int for count in counts) or not isinstance(found.settings, dict):
        raise TypeError("a count is no integer, or settings are no section")
    return found


def check(run: Run) -> Prepared:
    place = folder(run)
    found = load(place)
    _check_files(place, found)
    _check_settings(place, found, run)
    _check_tokenizer(place, found, run)
    _check_sources(place, found, run)
    _check_sizes(place, found, run)
    return found


def of_an_epoch(run: Run, found: Prepared) -> int:
    """Number of training sequences of one epoch."""
    tokens = 0
    if found.kind == "text":
        tokens = json_object.read(folder(run) / "report.json")["tokens"]["training"]["tokens"]
    return schedule.sequences(run, found.kind, found.sequences["training"], tokens)


def fill(run: Run) -> float:
    """Share of the positions of training sequences that hold tokens; the others are padding. Texts have none."""
    found = load(folder(run))
    if found.kind == "text":
        return 1.0
    counted = json_object.read(folder(run) / "report.json")["tokens"]["training"]
    each = objectives.sequences(run.train)
    positions = found.sequences["training"] * each * run.data.seq_length
    return (counted["tokens"] - counted["rows"] * each) / positions  # the last token of a row is only a label


def _check_files(place: Path, found: Prepared) -> None:
    changed = next(_changed([{"path": place / name, **entry} for name, entry in found.files.items()]), None)
    if changed:
        path, how = changed
        raise Fault(f"{path}: {how} since it was prepared; {AGAIN}")


def _check_sources(place: Path, found: Prepared, run: Run) -> None:
    for number, source in enumerate(found.sources):
        entries = source.get("files") or []
        there = _sources_now(run, number) if source.get("given_split") is None else []
        if there and len(there) != len(entries):
            raise Fault(f"data.source: {run.data.parts[number].source}: other files than were prepared; {AGAIN}")
        there = there or [Path(entry["path"]) for entry in entries]
        pairs = zip(there, entries, strict=True)
        if changed := next(_changed([entry | {"path": path} for path, entry in pairs if path.exists()]), None):
            raise Fault(f"{changed[0]}: was edited after its preparation into {place}; {AGAIN}")


def _sources_now(run: Run, number: int) -> list[Path]:
    """Files that the run names itself, wherever those lay that were prepared; none where they are not here."""
    source = run.data.parts[number].source if number < len(run.data.parts) else None
    try:
        return sources.files(source) if source and sources.is_local(source) else []
    except Fault:
        return []


def _changed(entries: list[dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Files that have changed, and how."""
    for entry in entries:
        path: Path = entry["path"]
        if not path.is_file():
            yield path, "gone"
        elif path.stat().st_size != entry["size"]:
            yield path, f"changed from {entry['size']} to {path.stat().st_size} bytes"
    if FAULT_FILE in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":
        return  # whoever started this rank has read them already, or the first rank of this host is at it
    with ThreadPoolExecutor() as pool:
        digests = pool.map(checksums.of_file, [entry["path"] for entry in entries])
        yield from ((e["path"], "changed") for e, now in zip(entries, digests, strict=True) if now != e["sha256"])


def _check_settings(place: Path, found: Prepared, run: Run, remedy: str = "") -> None:
    own = run.data.model_dump(mode="json")
    compared = found.settings.keys() & own.keys() - {"mixture"}  # its files are compared, whatever their names
    if not run.data.packed:
        compared -= {"seed"}  # it decides which rows share a sequence; their order is drawn when training starts
    if run.data.template.endswith(".jinja"):
        compared -= {"template"}  # its content is compared, whatever its name
        if checksums.of_file(Path(run.data.template)) != found.settings.get("template_file"):
            raise Fault(
                f"{run.data.template}: another template than the one {place} was prepared with; {remedy or AGAIN}"
            )
    later = identity.of_section(run.data, "prepare").keys() - found.settings.keys()  # were left out, at what that means
    settings = found.settings | {key: bearing.of(type(run.data).model_fields[key]).absent for key in later}
    for key in sorted(compared | {key for key in later if settings[key] is not bearing.ALWAYS}):
        if own[key] != settings[key]:
            raise Fault(
                f"data.{key}: {json.dumps(own[key])}, but {place} was prepared with {json.dumps(settings[key])}; "
                f"{remedy or f'{AGAIN}, or set data.{key} back'}"
            )
    if not run.data.packed or found.kind == "text":
        return
    needed, have = packing.multiple(run), found.settings.get("multiple", 0)
    if not have or have % needed:
        raise Fault(
            f"layout: cp {run.layout.cp}, tp {run.layout.tp} and sp {json.dumps(run.layout.sp)} need packed rows whose "
            f"length is a multiple of {needed}, but {place} was prepared for multiples of {have}; {remedy or AGAIN}"
        )


def _check_tokenizer(place: Path, found: Prepared, run: Run) -> None:
    if tokenizer.checksums.of_file(Path(run.paths.model)) != found.tokenizer:
        raise Fault(
            f"paths.model: {run.paths.model}: another tokenizer than the one that {place} was prepared with; {AGAIN}, "
            "or use the model that it was prepared for"
        )


def _check_sizes(place: Path, found: Prepared, run: Run) -> None:
    if lacks := lacking(run, str(place), found.kind, found.rows, found.sequences):
        raise Fault(lacks)
