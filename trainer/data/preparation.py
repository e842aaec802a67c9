"""Preparation of data: rows of any source become tokens in a folder, a few megabytes at a time."""

# pyright: reportArgumentType=false

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.rules import objectives
from conf.schema.data import Data, Part
from conf.schema.run import Run
from contract import output_marks
from contract.faults import Fault
from contract.output_marks import DATA, PREPARING, check_one
from trainer.data import blend, identity
from trainer.data.read import choose, shapes, sources
from trainer.data.tokens import templates, tokenizer
from trainer.data.write import outputs, packing, work
from trainer.data.write.chunks import Plan
from trainer.data.write.progress import Progress
from trainer.data.write.spool import Spool
from trainer.startup.console import say


def given(run: Run, folder: Path, out: Path) -> None:
    """Prepare files made by hand and split already: training.jsonl, and validation.jsonl and test.jsonl if there."""
    found = {number: folder / f"{name}.jsonl" for number, name in enumerate(choose.SPLITS)}
    found = {number: file for number, file in found.items() if file.exists()}
    prepare(run, [Part(source=str(file)) for file in found.values()], list(found), out)


def prepare(run: Run, parts: Sequence[Part], splits: Sequence[int | None], out: Path) -> None:
    """Prepare the data. `splits` holds the split that all of a part belongs to, where that is given."""
    start = time.monotonic()
    if not parts:
        raise Fault("data.source: required: a file, a folder, a Hub data set, or tiny://tickets")
    wanted = identity.of(run, parts, splits)
    tokens_already = blend.is_of(parts)
    if identity.is_made(out, wanted):
        identity.clear_up(_beside(Path(os.path.realpath(out))), wanted)
        say(f"prepare: {out} is prepared already")
        return
    tokens = tokenizer.load(Path(run.paths.model), run.model.trust_remote_code)
    if tokens.eos_token_id is None:
        raise Fault(f"paths.model: {run.paths.model}: the tokenizer names no eos_token, which pads sequences")
    out = Path(os.path.realpath(out))
    folder = _beside(out)
    check_one(out, DATA)
    check_one(folder, PREPARING)
    output_marks.recover(out, DATA)
    made = identity.begin(folder, wanted)
    report = blend.prepare(run, parts, tokens, made) if tokens_already else _of_rows(run, parts, splits, tokens, made)
    identity.unchanged(wanted, parts)
    identity.write(made / "report.json", report)
    identity.write(made / "template.json", report["template"])
    identity.finish(made, wanted, _facts(report, tokens), out)
    _tell(report, time.monotonic() - start)


def _beside(out: Path) -> Path:
    """The folder of a preparation that is not finished."""
    return out.with_name(f"{out.name}-preparing")


def _of_rows(run: Run, parts: Sequence[Part], splits: Sequence[int | None], tokens: Any, made: Path) -> dict[str, Any]:
    """Write the files of rows, and return the report."""
    folder = made.parent
    found = [_shape(part) for part in parts]
    kind = _kind(found)
    data = _of_answers(run) if kind == "preference" else run.data
    template = templates.choose(data, tokens, kind)
    plan = Plan(run.data, tuple(found), tuple(splits), template, packing.multiple(run), folder)
    done = work.run(plan, parts, Progress(folder / "progress.jsonl", sum(map(sources.total, parts))))
    say("prepare: write")
    report = outputs.write(plan, Spool(done.paths), done, made)
    report["sources"] = [
        {"source": part.source, "shape": shape.kind, "reason": shape.reason, "rows": rows}
        for part, shape, rows in zip(parts, found, done.rows, strict=True)
    ]
    return report


def _shape(part: Part) -> shapes.Shape:
    _, first, place = sources.columns(part)
    shape = shapes.detect(part, first, place)
    say(f"prepare: {part.source}: {shape.kind}: {shape.reason}")
    return shape


def _kind(found: Sequence[shapes.Shape]) -> str:
    kinds = {shape.kind for shape in found}
    if "text" in kinds and len(kinds) > 1:
        raise Fault("data.mixture: texts for pretraining cannot be mixed with rows that have answers")
    if "preference" in kinds and len(kinds) > 1:
        raise Fault("data.mixture: rows with a chosen and a rejected answer cannot be mixed with rows that have one")
    return next(kind for kind in ("text", "preference", "messages", "pairs") if kind in kinds)


def _of_answers(run: Run) -> Data:
    """Settings for two answers to one prompt, of which the answers alone count."""
    if lines := list(objectives.of_pairs(run.data)):
        raise Fault("\n".join(f"{key}: {problem}" for key, problem in lines))
    return run.data.model_copy(update={"loss_on": "answer"})


def _facts(report: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """Facts that training has to know."""
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
