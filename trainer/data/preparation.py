"""Preparation of data: rows of any source become tokens in a folder, a few megabytes at a time.

The identity of prepared data is everything that the data depend on. Data or parts with the same identity are reused.

<paths.data>/prepared.json    written last: the identity of the data, and the digest of each file
<preparing>/identity.json     the identity of an interrupted preparation
"""

# pyright: reportArgumentType=false

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.rules import objectives
from conf.schema.data import Data, Part
from conf.schema.identity import of_section
from conf.schema.run import Run
from contract import checksums, json_object, output_marks
from contract.faults import Fault
from contract.output_marks import DATA, PREPARING, check_one
from trainer.data import blend
from trainer.data.read import choose, shapes, sources
from trainer.data.tokens import templates, tokenizer
from trainer.data.write import outputs, packing, work
from trainer.data.write.chunks import Plan
from trainer.data.write.progress import Progress
from trainer.data.write.spool import Spool
from trainer.startup.console import say

VERSION = 1  # of the output; data of another version are prepared again
MANIFEST = "prepared.json"


def prepare_splits(run: Run, folder: Path, out: Path) -> None:
    """Prepare existing splits written by hand: training.jsonl, and validation.jsonl and test.jsonl if they exist."""
    files = {number: folder / f"{name}.jsonl" for number, name in enumerate(choose.SPLITS)}
    files = {number: file for number, file in files.items() if file.exists()}
    prepare(run, [Part(source=str(file)) for file in files.values()], list(files), out)


def prepare(run: Run, parts: Sequence[Part], splits: Sequence[int | None], out: Path) -> None:
    """Prepare the data. `splits` has an entry for each part: its split if the whole part is one split, else None."""
    start = time.monotonic()
    if not parts:
        raise Fault("data.source: required: a file, a folder, a Hub data set, or tiny://tickets")
    required = _identity(run, parts, splits)
    are_tokens = blend.is_of(parts)
    place = Path(os.path.realpath(out))
    folder = place.with_name(f"{place.name}-preparing")
    if _is_made(out, required):
        _clear_up(folder, required)
        say(f"prepare: {out} is already prepared")
        return
    tokens = tokenizer.of(run)
    check_one(place, DATA)
    check_one(folder, PREPARING)
    output_marks.recover(place, DATA)
    folder_of_files = begin(folder, required)
    report = (
        blend.prepare(run, parts, tokens, folder_of_files)
        if are_tokens
        else _of_rows(run, parts, splits, tokens, folder_of_files)
    )
    _require_unchanged(required, parts)
    _write(folder_of_files / "report.json", report)
    _write(folder_of_files / "template.json", report["template"])
    finish(folder_of_files, required, _facts(report, tokens), place)
    _tell(report, time.monotonic() - start)


def _of_rows(
    run: Run, parts: Sequence[Part], splits: Sequence[int | None], tokens: Any, output: Path
) -> dict[str, Any]:
    """Write the files for sources of rows. Return the report."""
    folder = output.parent
    part_shapes = [_shape(part) for part in parts]
    kind = _kind(part_shapes)
    data = _of_answers(run) if kind == "preference" else run.data
    template = templates.choose(data, tokens, kind)
    plan = Plan(run.data, tuple(part_shapes), tuple(splits), template, packing.multiple(run), folder)
    results = work.run(plan, parts, Progress(folder / "progress.jsonl", sum(map(sources.total, parts))))
    say("prepare: write")
    report = outputs.write(plan, Spool(results.paths), results, output)
    report["sources"] = [
        {"source": part.source, "shape": shape.kind, "reason": shape.reason, "rows": rows}
        for part, shape, rows in zip(parts, part_shapes, results.rows, strict=True)
    ]
    return report


def _shape(part: Part) -> shapes.Shape:
    first, place = sources.first(part)
    shape = shapes.detect(part, first, place)
    say(f"prepare: {part.source}: {shape.kind}: {shape.reason}")
    return shape


def _kind(part_shapes: Sequence[shapes.Shape]) -> str:
    kinds = {shape.kind for shape in part_shapes}
    if "text" in kinds and len(kinds) > 1:
        raise Fault("data.mixture: texts for pretraining cannot be mixed with rows that have answers")
    if "preference" in kinds and len(kinds) > 1:
        raise Fault("data.mixture: rows with a chosen and a rejected answer cannot be mixed with rows of one answer")
    return next(kind for kind in ("text", "preference", "messages", "pairs") if kind in kinds)


def _of_answers(run: Run) -> Data:
    """Return the data settings for rows with two answers to one prompt, in which only the answers are learned."""
    if lines := list(objectives.of_pairs(run.data)):
        raise Fault("\n".join(f"{key}: {problem}" for key, problem in lines))
    return run.data.model_copy(update={"loss_on": "answer"})


def _facts(report: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """Return the facts that training needs."""
    kind = report["template"]["kind"]
    rows = {name: report["rows"][name] for name in choose.SPLITS}
    packed = {name: entry["sequences"] for name, entry in report.get("packing", {}).items()}
    vocabulary = {"vocab_size": len(tokens), "pad_id": tokens.eos_token_id}
    name = "preference" if report.get("compares") else "text" if kind == "text" else "sft"
    return {"kind": name, "rows": rows, "sequences": rows | packed} | vocabulary


def _tell(report: dict[str, Any], seconds: float) -> None:
    rows, tokens = report["rows"], sum(entry["tokens"] for entry in report["tokens"].values())
    splits = ", ".join(f"{rows[name]:,} {name}" for name in choose.SPLITS)
    say(f"prepare: {rows['kept']:,} of {rows['read']:,} rows ({splits}), {tokens:,} tokens, in {seconds:.1f} s")
    for line in report["warnings"]:
        say(f"prepare: warning: {line}")


def _identity(run: Run, parts: Sequence[Part], splits: Sequence[int | None]) -> dict[str, Any]:
    settings = run.data.model_dump(mode="json", include={"mixture"}) | of_section(run.data, "prepare")
    if run.data.packed:
        settings["multiple"] = packing.multiple(run)
    if run.data.template.endswith(".jinja"):
        settings["template_file"] = checksums.of_file(Path(run.data.template))
    part_records = [
        {**part.model_dump(mode="json"), "given_split": split, "files": _files(part)}
        for part, split in zip(parts, splits, strict=True)
    ]
    tokens = tokenizer.digest(Path(run.paths.model))
    return {"version": VERSION, "settings": settings, "tokenizer": tokens, "sources": part_records}


def _files(part: Part) -> list[dict[str, Any]]:
    """Return the files of a local source with size and digest."""
    paths = sources.files(part.source) if part.source and sources.is_local(part.source) else []
    return [{"path": str(path), **_state(path)} for path in paths]


def _state(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": checksums.of_file(path)}


def _require_unchanged(identity: dict[str, Any], parts: Sequence[Part]) -> None:
    for part, entry in zip(parts, identity["sources"], strict=True):
        if _files(part) != entry["files"]:
            raise Fault(
                f"data.source: {part.source}: changed while it was read; start again when its files are complete"
            )


def _is_made(out: Path, identity: dict[str, Any]) -> bool:
    manifest = json_object.read_or_empty(out / MANIFEST)
    return {key: manifest.get(key) for key in identity} == identity and all(
        (out / name).is_file() and _state(out / name) == recorded
        for name, recorded in manifest.get("files", {}).items()
    )


def begin(folder: Path, identity: dict[str, Any]) -> Path:
    """Return the folder to write into. Chunks of an earlier attempt are kept if it had the same identity."""
    file, text = folder / "identity.json", _text(identity)
    if not (file.exists() and file.read_text() == text):
        output_marks.remove(folder, PREPARING)
        output_marks.begin(folder, PREPARING)
        file.write_text(text)
    output = folder / "files"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    return output


def _clear_up(folder: Path, identity: dict[str, Any]) -> None:
    """Remove the remaining files of a preparation that was killed after the rename of its data."""
    file = folder / "identity.json"
    if not file.exists() or file.read_text() == _text(identity):
        with contextlib.suppress(output_marks.Foreign):
            output_marks.remove(folder, PREPARING)


def finish(output: Path, identity: dict[str, Any], facts: dict[str, Any], out: Path) -> None:
    """Rename the finished folder to `out`, replacing a previous one."""
    files = {file.name: _state(file) for file in sorted(output.iterdir())}
    _write(output / MANIFEST, identity | facts | {"files": files})
    output_marks.put_in_place(output, out, DATA)
    output_marks.remove(output.parent, PREPARING)


def _text(identity: dict[str, Any]) -> str:
    return json.dumps(identity, indent=1)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
