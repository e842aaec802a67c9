"""Read a configuration of another stack, and write the same training for this project.

    python -m flows.adopt axolotl.yml                              print our YAML; the report is on stderr
    python -m flows.adopt train.sh --out mine.yaml                 write a file, and print the report
    python -m flows.adopt script.py --from trl --gpus 8            force the stack; it ran on 8 GPUs of one host
    python -m flows.adopt page.md --pick 2                         the second configuration of a page or script

It reads YAML and JSON, shell scripts, Python scripts and pages with code blocks. It runs nothing of the file.
The report lists each key of the file: understood, left out with the reason, or without counterpart. It also lists
differences in meaning, and the plan's verdict if the model is known.
Exit codes: 0, 1 for a defect, 2 for an error that you can fix (then nothing was written).
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from contract import closed_pipe, regular_files
from contract.faults import ConfigError
from contract.files import write_atomically
from flows import arguments
from flows.adopt import adopted, reading
from flows.adopt.adopted import Adopted
from flows.adopt.registry import STACKS

LONGEST = 100  # characters of a value in the report
YAML = re.compile(r"[\w./-]+\.ya?ml\b")  # names of files in a script


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.adopt().parse_args(argv)
    out = Path(options.out) if options.out else None
    if options.stack is not None and options.stack not in STACKS:
        raise ConfigError(f"--from: {options.stack}: unknown; it takes {', '.join(STACKS)}")
    if options.gpus is not None and not 1 <= options.gpus <= 100_000:
        raise ConfigError(f"--gpus: {options.gpus}: from 1 to 100000")
    if out and out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out: {out}: a configuration ends in .yaml")
    if out and regular_files.is_there(out) and not options.force:
        raise ConfigError(f"--out: {out}: exists already; --force replaces it")
    if out and not out.parent.is_dir():
        raise ConfigError(f"--out: {out.parent}: no such folder")
    result, others = adopt(Path(options.file), options.stack, options.pick, options.gpus, out.stem if out else None)
    if out:
        write_atomically(out, result.text, durable=False)
    else:
        print(result.text, end="")
    with contextlib.redirect_stdout(sys.stdout if out else sys.stderr):
        print("\n".join(report(result, options.file, others)))
        if options.plan:
            print("\n".join(verdict(result)))
        if out:
            print(f"\nwritten: {out}")
    return 0


def adopt(
    file: Path, stack: str | None = None, pick: int | None = None, gpus: int | None = None, name: str | None = None
) -> tuple[Adopted, list[str]]:
    """Return the configuration of a file, and the places of other configurations in the file."""
    text = reading.read(file)
    found = reading.choose(reading.sources(text, str(file)), stack, pick)
    if not found:
        of = f"of {STACKS[stack].title}" if stack else "that is known"
        named = YAML.search(text)
        other = f"; it names {named[0]}: adopt that file" if named else ""
        titles = ", ".join(one.title for one in STACKS.values() if not one.extends)
        raise ConfigError(
            f"{file}: no training configuration {of}; it looked for YAML, JSON, commands in a shell script, Python "
            f"calls, pages with code blocks and guides, of {titles}; --from NAME forces one of {', '.join(STACKS)}"
            f"{other}"
        )
    chosen, source = found[0]
    slug = re.sub(r"[^a-z0-9]+", "-", (name or file.stem).lower()).strip("-")[:60] or "adopted"
    with tempfile.TemporaryDirectory(prefix="finetune-adopt-") as folder:
        result = adopted.convert(source, chosen, slug, Path(folder), gpus)
    return result, [f"{one.title}, {part.place}" for one, part in found[1:]]


def report(result: Adopted, file: str, others: Sequence[str]) -> Iterator[str]:
    yield f"{file}: {result.stack.title}, {result.source.place}"
    keys = result.source.keys
    yield from _section("understood", result.understood, keys, " -> ")
    yield from _section("without counterpart", result.unread, keys, ": ")
    yield from _section("left out, without effect on the result here", result.left_out, keys, ": ")
    yield from _section("missing, set it in the file", result.missing, {}, ": ")
    if result.differences:
        yield f"\ndifferences in meaning ({len(result.differences)}):"
        yield from (f"  {line}" for line in result.differences)
    if others:
        yield f"\nother configurations in this file, from --pick 2 on: {'; '.join(others[:20])}"


def _section(title: str, rows: Mapping[str, str], values: Mapping[str, object], sign: str) -> Iterator[str]:
    if not rows:
        return
    yield f"\n{title} ({len(rows)}):"
    for key, text in rows.items():
        value = " ".join(str(values[key]).split()) if key in values else ""
        shown = f" = {value[:LONGEST]}{'...' * (len(value) > LONGEST)}" if value else ""
        yield f"  {_line(key + shown)}{sign}{_line(text)}"


def _line(words: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in words)


def verdict(result: Adopted) -> Iterator[str]:
    """Return the last lines of the plan, or why there is none."""
    from flows import plan

    yield "\nplan:"
    with tempfile.TemporaryDirectory(prefix="finetune-adopt-") as folder:
        file = Path(folder) / "adopted.yaml"
        file.write_text(result.text)
        said, wrong = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            plan.main([str(file)])
    errors = [line.replace(f"{file}: ", "") for line in wrong.getvalue().splitlines()]
    unknown = [line.partition("; known are")[0] for line in errors]
    yield from (f"  {line.removeprefix('error: ')}" for line in unknown)
    if any("unknown model" in line for line in errors):
        yield "  a plan needs the model's config.json: set model.source to a folder with it, or paths.model"
    yield from (f"  {line}" for line in said.getvalue().splitlines()[-1:])


if __name__ == "__main__":
    closed_pipe.run(main)
