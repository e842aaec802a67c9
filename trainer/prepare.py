"""Data for training: rows from any source, understood, templated, tokenised, checked, split and packed.

    python -m trainer.prepare CONF [key=value ...]

Reads data.source (or the parts of data.mixture) and the tokenizer in paths.model. Writes into paths.data:

    training.jsonl, validation.jsonl, test.jsonl    Megatron-Bridge's rows, with the index files that it would make
    training.idx.parquet, validation.idx.parquet    their tokens, and which are learned; packed where data.packed
    training.bin, training.idx, ...                 in place of these for texts: megatron-core's indexed data sets
    template.json                                   how rows became tokens; evaluation uses the same
    report.json                                     what was found, and what was left out
    prepared.json                                   every file with its digest; training refuses what has been changed

The work is done a few megabytes at a time by data.processes processes, in a folder beside paths.data; killed, it goes
on where it was. What was prepared before stays there until all is made; rows made by hand, and what else is not
trainer.prepare's, are never replaced. Memory grows by about 100 bytes a row.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf import output_marks
from conf.data import Part
from conf.output_marks import DATA, PREPARING
from conf.schema import Run
from trainer import entry
from trainer.console import say
from trainer.data import choose, identity, outputs, packing, shapes, sources, templates, tokenizer, work
from trainer.data.chunks import Plan
from trainer.data.progress import Progress
from trainer.data.spool import Spool
from trainer.faults import Fault
from trainer.places import check_one


def main(run: Run) -> None:
    prepare(run, run.data.parts, [None] * len(run.data.parts), Path(run.paths.data))


def given(run: Run, folder: Path, out: Path) -> None:
    """Files made by hand and split already: training.jsonl; validation.jsonl and test.jsonl where there are such."""
    found = {number: folder / f"{name}.jsonl" for number, name in enumerate(choose.SPLITS)}
    found = {number: file for number, file in found.items() if file.exists()}
    prepare(run, [Part(source=str(file)) for file in found.values()], list(found), out)


def prepare(run: Run, parts: Sequence[Part], splits: Sequence[int | None], out: Path) -> None:
    """`splits` holds the split that all of a part belongs to, where that is given."""
    start = time.monotonic()
    if not parts:
        raise Fault("data.source: required: a file, a folder, a Hub data set, or tiny://tickets")
    wanted = identity.of(run, parts, splits)
    if identity.is_made(out, wanted):
        say(f"prepare: {out} is prepared already")
        return
    tokens = tokenizer.load(Path(run.paths.model), run.model.trust_remote_code)
    if tokens.eos_token_id is None:
        raise Fault(f"paths.model: {run.paths.model}: the tokenizer names no eos_token, which pads sequences")
    out = Path(os.path.realpath(out))
    folder = out.with_name(f"{out.name}-preparing")
    check_one(out, DATA)
    check_one(folder, PREPARING)
    output_marks.recover(out, DATA)
    made = identity.begin(folder, wanted)
    found = [_shape(part) for part in parts]
    template = templates.choose(run.data, tokens, _kind(found))
    plan = Plan(run.data, tuple(found), tuple(splits), template, packing.multiple(run), folder)
    done = work.run(plan, parts, Progress(folder / "progress.jsonl", sum(map(sources.total, parts))))
    identity.unchanged(wanted, parts)
    say("prepare: write")
    report = outputs.write(plan, Spool(done.paths), done, made)
    report["sources"] = [
        {"source": part.source, "shape": shape.kind, "reason": shape.reason, "rows": rows}
        for part, shape, rows in zip(parts, found, done.rows, strict=True)
    ]
    identity.write(made / "report.json", report)
    identity.write(made / "template.json", report["template"])
    identity.finish(made, wanted, _facts(report, template.kind, tokens), out)
    _tell(report, time.monotonic() - start)


def _shape(part: Part) -> shapes.Shape:
    _, first, place = sources.columns(part)
    shape = shapes.detect(part, first, place)
    say(f"prepare: {part.source}: {shape.kind}: {shape.reason}")
    return shape


def _kind(found: Sequence[shapes.Shape]) -> str:
    kinds = {shape.kind for shape in found}
    if "text" in kinds and len(kinds) > 1:
        raise Fault("data.mixture: texts for pretraining cannot be mixed with rows that have answers")
    return next(kind for kind in ("text", "messages", "pairs") if kind in kinds)


def _facts(report: dict[str, Any], kind: str, tokens: Any) -> dict[str, Any]:
    """What training has to know."""
    rows = {name: report["rows"][name] for name in choose.SPLITS}
    packed = {name: entry["sequences"] for name, entry in report.get("packing", {}).items()}
    vocabulary = {"vocab_size": len(tokens), "pad_id": tokens.eos_token_id}
    return {"kind": "text" if kind == "text" else "sft", "rows": rows, "sequences": rows | packed} | vocabulary


def _tell(report: dict[str, Any], seconds: float) -> None:
    rows, tokens = report["rows"], sum(entry["tokens"] for entry in report["tokens"].values())
    splits = ", ".join(f"{rows[name]:,} {name}" for name in choose.SPLITS)
    say(f"prepare: {rows['kept']:,} of {rows['read']:,} rows ({splits}), {tokens:,} tokens, in {seconds:.1f} s")
    for line in report["warnings"]:
        say(f"prepare: warning: {line}")


def check(run: Run) -> None:
    if not Path(run.paths.model).is_dir():
        raise Fault(f"paths.model: {run.paths.model}: no such folder; the tokenizer in it is needed")


if __name__ == "__main__":
    entry.start(main, check, alone=True, writes="data")
