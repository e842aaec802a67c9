"""Write a configuration for your model and data: a YAML file with a reason for each value, and its deployment.

    python -m flows.new                                            asks for missing arguments
    python -m flows.new Qwen/Qwen3-30B-A3B my.jsonl                for the GPUs of this host
    python -m flows.new ./model my.csv --gpus 8xh100 --name helpdesk
    python -m flows.new ./model my.csv data.input=ticket data.output=team adapter.rank=32 --print

The command reads config.json, the tokenizer and the first rows of the data, and no weights. KEY=VALUE sets any key of
python -m conf.schema; dependent values follow. Without a terminal, or with --yes, it asks nothing.
Exit codes: 0, 1 for a defect, 2 for an error that you can fix (then nothing was written).
"""

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment
from pydantic import ValidationError

from conf import noise
from conf.load import FOLDER, OWN, load, read_overrides
from contract import closed_pipe, regular_files
from contract.faults import ConfigError, Fault
from contract.files import write_atomically
from contract.first_rows import FirstRows
from contract.installation import home
from flows import arguments
from flows.arguments import DATA, MACHINE, MODEL, refused
from flows.new import choices, commented_yaml, deployment, machine, model, planned, rows
from flows.new.machine import Machine
from flows.new.planned import Settled

DEPLOYMENTS = home() / deployment.NAME
TOLD = Path(__file__).with_name("told.txt.j2")
LONGEST = 60  # characters of a generated name

OTHERWISE = {"name": "use --name", "model.source": "use MODEL", "data.source": "use DATA"}


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="finetune-new-") as folder:
            return _new(options, Path(folder))
    except (KeyboardInterrupt, click.Abort):
        return refused("interrupted; nothing was written", code=130)


def _new(options: argparse.Namespace, folder: Path) -> int:
    asks = sys.stdin.isatty() and not options.yes
    here, unknown = None, list[str]()  # the GPUs of this host, and why they cannot be used
    if options.gpus is None or options.gpus.isdigit():
        with _noted(unknown):
            here = machine.of_this_host()
    if asks:
        options.model = options.model or _asked("Model (org/name on the Hub, a folder, s3://...)")
        options.data = options.data or _asked("Data (a file, a folder, org/name on the Hub, s3://...)")
        if options.gpus is None and not unknown:
            usual = here.shown if here else "none on this host; Enter chooses this CPU or the fewest GPUs that fit"
            options.gpus = _asked(f"GPUs, {MACHINE} [{usual}]", empty=True) or None
        options.name = options.name or _asked(f"Name [{_name(options)}]", empty=True) or None
    name, path, wrong = _place(options)
    given, _, unread = read_overrides(options.overrides)
    wrong += unread + [f"{key}: {OTHERWISE[key]}" for key in given if key in OTHERWISE]
    wrong += [f"{key}: the flow sets all paths" for key in given if key.startswith("paths.")]
    on = here
    if options.gpus is None:
        wrong += unknown
    else:
        with _noted(wrong):
            on = machine.parse(options.gpus, here)
    wrong += [
        f"{what.upper()}: missing; {words}"
        for what, words in (("model", MODEL), ("data", DATA))
        if not getattr(options, what)
    ]
    looked = _look(options, given, wrong, folder)
    if wrong or looked is None:
        raise ConfigError(*wrong)
    found, first = looked
    if found.lacks:
        print(f"note: {found.lacks}", file=sys.stderr)
    given = {key: _whole(value) for key, value in given.items()}
    given |= {"model.source": found.source, "data.source": rows.whole(options.data)}
    settled = _settled(name, found, first, on, given)
    text = _text(settled, found, path)
    _check(text, name, folder)
    if options.print:
        print(text, end="")
    else:
        _write(path, text, settled, found)
    _tell(settled, first, path, options.print)
    return 0


def _whole(value: Any) -> Any:
    """Return the value with paths such as ~/x and ./x made absolute, because a worker runs in another folder."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return regular_files.whole(value) if isinstance(value, str) and re.match(r"(~|\.\.?)/", value) else value


@contextlib.contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """Add the lines of a fault to `wrong`, and continue after the block."""
    try:
        yield
    except Fault as fault:
        wrong += [line for line in str(fault).splitlines() if line not in wrong]


def _asked(question: str, empty: bool = False) -> str:
    return click.prompt(question, default="" if empty else None, show_default=False, err=True).strip()


def _place(options: argparse.Namespace) -> tuple[str, Path, list[str]]:
    """Return the name and the file of the configuration, and the errors in them."""
    wanted = options.name or _name(options)
    is_file = wanted.endswith((".yaml", ".yml")) or "/" in wanted
    path = Path(regular_files.whole(wanted)) if is_file else OWN / f"{wanted}.yaml"
    if not is_file and (tracked := FOLDER / path.name).exists():
        path = tracked
    name = path.stem if is_file else wanted
    if not re.fullmatch(r"[a-z0-9-]{1,100}", name):
        return name, path, [f"--name: {name!r}: use a-z, 0-9 and -, such as {_slug(name) or 'helpdesk'}"]
    if is_file and path.suffix not in (".yaml", ".yml"):
        return name, path, [f"--name: {wanted}: a file ends in .yaml; a name has no slash"]
    if options.print:
        return name, path, []
    if not path.parent.is_dir() and path.parent != OWN:
        return name, path, [f"--name: {path.parent}: no such folder"]
    if (path.exists() or path.is_symlink()) and not options.force:
        return name, path, [f"--name: {_shown(path)}: exists already; --force replaces it, another name keeps it"]
    return name, path, []


def _name(options: argparse.Namespace) -> str:
    """Return a name made from the names of the model and the data."""
    parts = [
        re.sub(r"\.[a-z.]+$", "", (one or "").rstrip("/").rpartition("/")[2]) for one in (options.model, options.data)
    ]
    return _slug("-".join(filter(None, parts)))[:LONGEST].strip("-") or "mine"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _look(
    options: argparse.Namespace, given: dict[str, Any], wrong: list[str], folder: Path
) -> tuple[model.Model, FirstRows] | None:
    """Inspect model and data, and add their errors to `wrong`."""
    draft = folder / "draft.yaml"
    draft.write_text(
        "name: draft\ntrain: {steps: 2147483647, global_batch: 1}\noptimizer: {lr: 1e-4}\n"
        "checkpoint: {save_every: 1}\ndata: {seq_length: 1024}\nmodel: {source: none}\n"
    )
    sources = {"model.source": options.model or "none", "data.source": options.data or "none"}
    places = [f"{key}={commented_yaml.in_line(value)}" for key, value in sources.items() if key not in given]
    run = load(draft, places)  # errors in model and data are reported even if another override is wrong
    with _noted(wrong):
        run = load(draft, [*options.overrides, *places], illegal=True)
    found = first = None
    if options.model:
        with _noted(wrong):
            found = model.read(run.model, folder / "model")
    if options.data:
        with _noted(wrong):
            rows.whole(options.data)
            first = rows.look(run, found.tokenizer if found else None, folder / "look")
    return (found, first) if found and first else None


def _settled(name: str, found: model.Model, first: FirstRows, on: Machine | None, given: dict[str, Any]) -> Settled:
    def made(on: Machine, unserved: str = "") -> choices.Choices:
        chosen = choices.choose(name, found, first, on, given)
        if unserved:
            choices.without_evaluation(chosen, unserved)
        return chosen

    try:
        settled = planned.settle_on(on, found, made) if on else planned.choose_machine(found, made)
        if why := settled.plan.unserved:
            settled = planned.settle_on(settled.machine, found, partial(made, unserved=why))
    except ValidationError as error:
        raise ConfigError(*(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())) from None
    return settled


def _text(settled: Settled, found: model.Model, path: Path) -> str:
    kind = settled.run.adapter.kind
    trained = "every weight trained" if kind == "none" else f"with {choices.KINDS[kind]}"
    head = [
        f"{found.shown} ({found.size}) {trained}, on {settled.machine.shown}.",
        "",
        "Written by python -m flows.new; every value may be changed. python -m conf.schema lists all keys.",
        f"The plan was: {planned.told(settled)}.",
    ]
    schema = {FOLDER: "schema.json", OWN: "../schema.json"}.get(path.parent, "")
    return commented_yaml.text(settled.choices, head, schema)


def _check(text: str, name: str, folder: Path) -> None:
    """Check that the flow can read the text, before it is written to its file."""
    file = folder / f"{name}.yaml"
    file.write_text(text)
    try:
        load(file)
    except ConfigError as fault:
        raise ConfigError(*(line.removeprefix(f"{file}: ") for line in fault.args)) from None


def _write(path: Path, text: str, settled: Settled, found: model.Model) -> None:
    """Write the configuration and its deployment, both or neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent != OWN:
        write_atomically(path, text, durable=False)
        return
    before = DEPLOYMENTS.read_text() if DEPLOYMENTS.exists() else ""
    about = f"{found.shown} on {settled.machine.shown}, written by flows.new."
    after = deployment.with_deployment(before, path.stem, about, settled.machine.gpu.cuda)
    if after != before:
        write_atomically(DEPLOYMENTS, after, durable=False)
    try:
        write_atomically(path, text, durable=False)
    except BaseException:
        if not before:
            DEPLOYMENTS.unlink(missing_ok=True)
        elif after != before:
            write_atomically(DEPLOYMENTS, before, durable=False)
        raise


def _tell(settled: Settled, first: FirstRows, path: Path, printed: bool) -> None:
    """Print the choices and the next commands."""
    words = Environment(trim_blocks=True, lstrip_blocks=True)
    words.filters["command"] = lambda command: arguments.spoken(command).replace("python", _python(), 1)
    text = words.from_string(TOLD.read_text("utf-8")).render(
        printed=printed,
        file=_shown(path),
        name=path.stem if path.parent in (OWN, FOLDER) else _shown(path),
        deployed=path.parent == OWN,
        deployments=DEPLOYMENTS.name,
        made=settled.choices.made,
        first=first,
        run=settled.run,
        machine=settled.machine,
        plan=planned.told(settled),
        few=noise.warning(settled.run, None if first.rows is None else round(first.rows * settled.run.data.test)),
    )
    print(text, end="", file=sys.stderr if printed else sys.stdout)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _python() -> str:
    on_path = shutil.which("python")
    return "python" if on_path and Path(on_path) == Path(sys.executable) else _shown(Path(sys.executable))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.new()
    options = parser.parse_intermixed_args(argv)
    words = [word for word in (options.model, options.data, *options.overrides) if word is not None]
    options.overrides = [word for word in words if re.match(r"[a-z_]+(\.[a-z0-9_]+)?=", word)]
    named = [word for word in words if word not in options.overrides]
    if len(named) > 2:
        parser.error(f"{named[2]}: only MODEL and DATA are names; all other words have the form key=value")
    options.model, options.data = (*named, None, None)[:2]
    return options


if __name__ == "__main__":
    closed_pipe.run(main)
