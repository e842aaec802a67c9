"""Identity of prepared data: everything that the data depend on. Data or parts with the same identity are reused.

<paths.data>/prepared.json    written last: the identity of the data, and the digest of each file
<preparing>/identity.json     the identity of an interrupted preparation
"""

# pyright: reportArgumentType=false

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema.data import Part
from conf.schema.identity import of_section
from conf.schema.run import Run
from contract import checksums, json_object, output_marks
from contract.faults import Fault
from contract.output_marks import DATA, PREPARING
from trainer.data.read import sources
from trainer.data.tokens import tokenizer
from trainer.data.write import packing

VERSION = 1  # of the output; data of another version are prepared again
MANIFEST = "prepared.json"


def of(run: Run, parts: Sequence[Part], splits: Sequence[int | None]) -> dict[str, Any]:
    settings = run.data.model_dump(mode="json", include={"mixture"}) | of_section(run.data, "prepare")
    if run.data.packed:
        settings["multiple"] = packing.multiple(run)
    if run.data.template.endswith(".jinja"):
        settings["template_file"] = checksums.of_file(Path(run.data.template))
    part_records = [
        {**part.model_dump(mode="json"), "given_split": split, "files": files(part)}
        for part, split in zip(parts, splits, strict=True)
    ]
    tokens = tokenizer.digest(Path(run.paths.model))
    return {"version": VERSION, "settings": settings, "tokenizer": tokens, "sources": part_records}


def files(part: Part) -> list[dict[str, Any]]:
    """Return the files of a local source with size and digest."""
    paths = sources.files(part.source) if part.source and sources.is_local(part.source) else []
    return [{"path": str(path), **state(path)} for path in paths]


def state(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": checksums.of_file(path)}


def unchanged(identity: dict[str, Any], parts: Sequence[Part]) -> None:
    for part, entry in zip(parts, identity["sources"], strict=True):
        if files(part) != entry["files"]:
            raise Fault(
                f"data.source: {part.source}: changed while it was read; start again when its files are complete"
            )


def is_made(out: Path, identity: dict[str, Any]) -> bool:
    manifest = json_object.read_or_empty(out / MANIFEST)
    return {key: manifest.get(key) for key in identity} == identity and all(
        (out / name).is_file() and state(out / name) == recorded for name, recorded in manifest.get("files", {}).items()
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


def clear_up(folder: Path, identity: dict[str, Any]) -> None:
    """Remove the remaining files of a preparation that was killed after the rename of its data."""
    file = folder / "identity.json"
    if not file.exists() or file.read_text() == _text(identity):
        with contextlib.suppress(output_marks.Foreign):
            output_marks.remove(folder, PREPARING)


def finish(output: Path, identity: dict[str, Any], facts: dict[str, Any], out: Path) -> None:
    """Rename the finished folder to `out`, replacing a previous one."""
    files = {file.name: state(file) for file in sorted(output.iterdir())}
    write(output / MANIFEST, identity | facts | {"files": files})
    output_marks.put_in_place(output, out, DATA)
    output_marks.remove(output.parent, PREPARING)


def _text(identity: dict[str, Any]) -> str:
    return json.dumps(identity, indent=1)


def write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
