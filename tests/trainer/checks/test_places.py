"""Only what this project has made is replaced: every command, and all that may stand where it writes."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.load import load
from contract import output_marks
from contract.faults import Fault
from contract.files import write_atomically
from contract.output_marks import BASE, DATA, EVALUATION, EXPORT, PREPARING, TRAINING, Kind
from trainer.checks import places
from trainer.data import preparation
from trainer.rehearsal import tiny_models
from trainer.weights import atomic_folder

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Command:
    check: Callable
    key: str  # of what it makes
    kind: Kind
    of_before: dict[str, str]  # what 4906b5a has left there
    inputs: tuple[str, ...]  # folders of the world, as input() makes it


MARK = json.dumps({"architecture": "Toy", "stamps": {}, "files": {"weights": 3}})
EXPORTED = json.dumps({"step": 6, "formats": ["merged"], "files": {"merged/model.safetensors": 3}})
PREPARED = json.dumps({"version": 1, "settings": {}, "sources": [], "files": {"training.jsonl": {"size": 3}}})
COMMANDS = {
    "convert": Command(places.check_convert, "base", BASE, {"weights": "old", "complete.json": MARK}, ("model",)),
    "prepare": Command(
        places.check_prepare, "data", DATA, {"training.jsonl": "old", "prepared.json": PREPARED}, ("model", "rows")
    ),
    "train": Command(
        places.check_train,
        "output",
        TRAINING,
        {"metrics.jsonl": '{"kind": "start", "step": 0}\n', "checkpoints/iter_0000001/half": "old"},
        ("model", "base", "data", "rows"),
    ),
    "export": Command(
        places.check_export,
        "export",
        EXPORT,
        {"merged/model.safetensors": "old", "complete.json": EXPORTED},
        ("model", "base", "output"),
    ),
    "evaluate": Command(
        places.check_evaluate,
        "evaluation",
        EVALUATION,
        {"results.json": '{"metrics": {}, "rows": {}, "samples": {}}', "log.txt": "old"},
        ("served", "data"),
    ),
}


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# What may stand in an output's place. Each makes it there, and says whether the command may go on.


def nothing(place: Path, command: Command) -> bool:
    return True


def an_empty_folder(place: Path, command: Command) -> bool:
    place.mkdir()
    return True


def its_own_old_output(place: Path, command: Command) -> bool:
    fill(place, command.of_before)
    return True


def half_made_output(place: Path, command: Command) -> bool:
    output_marks.begin(place, command.kind)
    fill(place, {"half": "of it"})
    return True


def half_made_output_beside(place: Path, command: Command) -> bool:
    suffix, kind = ("-preparing", PREPARING) if command.kind is DATA else (".partial", command.kind)
    output_marks.begin(place.with_name(place.name + suffix), kind)
    fill(place.with_name(place.name + suffix), {"files/half": "of it"})
    return True


def logs_of_a_conversion(place: Path, command: Command) -> bool:
    fill(place, {"logs/rank00000.log": "converted"})
    return command.kind is TRAINING


def a_link_to_its_old_output(place: Path, command: Command) -> bool:
    fill(place.with_name("elsewhere"), command.of_before)
    place.symlink_to("elsewhere")
    return True


def a_link_to_nothing(place: Path, command: Command) -> bool:
    place.symlink_to("not there yet")
    return True


def a_folder_of_others(place: Path, command: Command) -> bool:
    fill(place, {"thesis.tex": "years of work", "figures/one.svg": "<svg>"})
    return False


def a_mark_that_is_none(place: Path, command: Command) -> bool:
    fill(place, {command.kind.mark or "metrics.jsonl": '{"files": {}}', "thesis.tex": "years of work"})
    return False


def a_file_of_others_beside_its_output(place: Path, command: Command) -> bool:
    """What is written into, and not replaced, keeps it."""
    fill(place, command.of_before | {"notes.txt": "what came out"})
    return not command.kind.whole


def a_file_of_others_below_its_output(place: Path, command: Command) -> bool:
    fill(place, command.of_before | {"merged/notes.txt": "what came out"})
    return not command.kind.whole


def what_another_command_has_made(place: Path, command: Command) -> bool:
    other = "export" if command.kind is not EXPORT else "convert"
    fill(place, COMMANDS[other].of_before)
    return False


def a_file(place: Path, command: Command) -> bool:
    place.write_text("not a folder")
    return False


def a_pipe(place: Path, command: Command) -> bool:
    os.mkfifo(place)
    return False


def a_link_to_itself(place: Path, command: Command) -> bool:
    place.symlink_to(place.name)
    return False


def a_folder_of_others_where_it_is_made(place: Path, command: Command) -> bool:
    for suffix in (".partial", "-preparing"):
        fill(place.with_name(place.name + suffix), {"thesis.tex": "years of work"})
    return not command.kind.whole


THINGS = [
    nothing,
    an_empty_folder,
    its_own_old_output,
    half_made_output,
    half_made_output_beside,
    logs_of_a_conversion,
    a_link_to_its_old_output,
    a_link_to_nothing,
    a_folder_of_others,
    a_mark_that_is_none,
    a_file_of_others_beside_its_output,
    a_file_of_others_below_its_output,
    what_another_command_has_made,
    a_file,
    a_pipe,
    a_link_to_itself,
    a_folder_of_others_where_it_is_made,
]


@pytest.fixture
def world(tmp_path) -> Path:
    fill(tmp_path / "model", {"config.json": "{}", "model.safetensors": "weights", "inner/file": "of the model"})
    fill(tmp_path / "served", {"config.json": "{}", "model.safetensors": "tuned"})
    fill(
        tmp_path / "rows", {"a.jsonl": '{"input": "1", "output": "2"}\n', "b.jsonl": '{"input": "3", "output": "4"}\n'}
    )
    for name in ("convert", "prepare", "train"):
        fill(tmp_path / COMMANDS[name].key, COMMANDS[name].of_before)
    return tmp_path


def configure(world: Path, command: Command, place: Path | str):
    names = ("model", "base", "data", "output", "logs", "export", "served", "evaluation")
    paths = {name: world / name for name in names} | {"parity": world / "output/parity.json", command.key: place}
    return load("tiny", [f"data.source={world / 'rows'}", *(f"paths.{name}={path}" for name, path in paths.items())])


def tree(folder: Path, but: tuple[Path, ...] = ()) -> dict[str, str]:
    """Everything below a folder, with digests of files."""
    found = {}
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(here, name) not in but or Path(here, name).is_symlink()]
        for path in (Path(here, name) for name in (*names, *folders)):
            if path in but:
                continue
            kind = "link" if path.is_symlink() else "file" if path.is_file() else "folder" if path.is_dir() else "other"
            text = os.readlink(path).encode() if kind == "link" else path.read_bytes() if kind == "file" else b""
            found[str(path.relative_to(folder))] = f"{kind} {hashlib.sha256(text).hexdigest()}"
    return found


def work(command: Command, place: Path) -> None:
    """What the command does to its place, with a toy for what it makes."""
    if command.kind in (BASE, EXPORT):
        facts = json.loads(command.of_before["complete.json"])
        del facts["files"]
        with atomic_folder.write(place, facts, command.kind, "new") as partial:
            (partial / "new").write_text("new")
    elif command.kind is DATA:
        place = Path(os.path.realpath(place))
        made = preparation.begin(place.with_name(f"{place.name}-preparing"), {"settings": {}, "sources": []})
        (made / "new").write_text("new")
        preparation.finish(made, {"settings": {}, "sources": []}, {}, place)
    else:
        output_marks.take(place, command.kind)
        (place / "new").write_text("new")


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_only_what_the_command_has_made_is_replaced(name, thing, world):
    command, place = COMMANDS[name], world / "place"
    may = thing(place, command)
    before, run = tree(world), configure(world, COMMANDS[name], place)
    if not may:
        with pytest.raises(Fault) as fault:
            command.check(run)
        assert all(f"paths.{command.key}: {place}" in line for line in str(fault.value).splitlines())
        if command.kind in (BASE, EXPORT):  # also where nobody has checked
            with pytest.raises((Fault, OSError)):
                work(command, place)
        assert tree(world) == before
        return
    command.check(run)
    assert tree(world) == before, "a check changes nothing"
    work(command, place)
    assert (place / "new").read_text() == "new"
    own = (place, Path(os.path.realpath(place)), world / "place.partial", world / "place-preparing")
    assert tree(world, own) == {key: value for key, value in before.items() if not _in(world / key, own)}
    if not command.kind.whole and "notes.txt" in str(before):
        assert (place / "notes.txt").exists() or (place / "merged/notes.txt").exists()
    if command.kind.whole:
        assert not [path.name for path in world.iterdir() if path.name.startswith("place") and path != place]


def _in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)


def the_same(world: Path, what: Path) -> Path:
    return what


def a_link_to(world: Path, what: Path) -> Path:
    (world / "link").symlink_to(what)
    return world / "link"


def a_link_on_the_way_to(world: Path, what: Path) -> Path:
    (world / "link").symlink_to(world)
    return world / "link" / what.name


def a_roundabout_name_of(world: Path, what: Path) -> Path:
    return what.parent / "model/inner/../.." / what.name


def a_new_folder_inside(world: Path, what: Path) -> Path:
    return what / "new/and deeper"


def a_new_folder_inside_a_link_to(world: Path, what: Path) -> Path:
    return a_link_to(world, what) / "new"


def what_holds(world: Path, what: Path) -> Path:
    return what.parent


WAYS = [
    the_same,
    a_link_to,
    a_link_on_the_way_to,
    a_roundabout_name_of,
    a_new_folder_inside,
    a_new_folder_inside_a_link_to,
    what_holds,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("name", "what"), [(n, what) for n, c in COMMANDS.items() for what in c.inputs])
def test_an_output_that_meets_an_input_is_refused(name, what, way, world):
    command = COMMANDS[name]
    place = way(world, world / what)
    before = tree(world)
    with pytest.raises(Fault) as fault:
        command.check(configure(world, command, place))
    key = "data.source" if what == "rows" else f"paths.{what}"
    assert any(
        line.startswith(f"paths.{command.key}: {place}: ") and key in line for line in str(fault.value).splitlines()
    )
    assert tree(world) == before


@pytest.mark.parametrize("name", ["convert", "train", "export"])
def test_two_outputs_that_meet_are_refused(name, world):
    command = COMMANDS[name]
    run = configure(world, command, world / "logs/inside")
    with pytest.raises(Fault, match=rf"logs.* (holds|lies inside) paths\.{command.key}|lies inside paths.logs"):
        command.check(run)


def test_all_that_meets_is_said_at_once(world):
    run = configure(world, COMMANDS["convert"], world / "model")
    run = run.model_copy(update={"paths": run.paths.model_copy(update={"logs": str(world / "model/logs")})})
    with pytest.raises(Fault) as fault:
        places.check_convert(run)
    lines = str(fault.value).splitlines()
    assert lines[0] == f"paths.base: {world}/model: is paths.model as well; every output needs a separate folder"
    assert any(line.startswith(f"paths.logs: {world}/model/logs: lies inside paths.model") for line in lines)


def test_a_released_model_where_a_base_would_be_made_is_refused(world):
    """paths.model x.partial, paths.base x."""
    (world / "model").rename(world / "x.partial")
    run = configure(world, COMMANDS["convert"], world / "x")
    run = run.model_copy(update={"paths": run.paths.model_copy(update={"model": str(world / "x.partial")})})
    with pytest.raises(Fault, match=r"x\.partial: is paths.model as well"):
        places.check_convert(run)


def test_a_link_among_the_rows_that_leads_into_the_output_is_seen(world):
    (world / "rows/c.jsonl").symlink_to(world / "data/training.jsonl")
    with pytest.raises(Fault, match=r"paths.data: .*/data: holds data.source"):
        places.check_prepare(configure(world, COMMANDS["prepare"], world / "data"))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("model/config.json/x", "is a file, so nothing can lie inside it"),
        ("n" * 256, "a name of 256 bytes"),
        ("n" * 250, "a name of 250 bytes"),
        (f"{'n' * 256}/x", "a name of 256 bytes"),
        ("/".join(["n" * 200] * 30), "a path of"),
        ("nu\0ll", "null character"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_line(name, place, said, world):
    command = COMMANDS[name]
    run = configure(world, command, world / "place")
    run = run.model_copy(update={"paths": run.paths.model_copy(update={command.key: str(world / place)})})
    with pytest.raises(Fault) as fault:
        command.check(run)
    shown = [line for line in str(fault.value).splitlines() if line.startswith(f"paths.{command.key}: ")]
    assert len(shown) == 1
    assert said in shown[0] or "lies inside paths.model" in shown[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_to_is_one_line(name):
    """By a user whom permissions bind, unlike root."""
    with tempfile.TemporaryDirectory() as given:
        world = Path(given)
        (world / "kept").mkdir()
        for folder, mode in ((world / "kept", 0o555), (world, 0o755)):
            folder.chmod(mode)
        run = configure(world, COMMANDS[name], world / "kept/place")
        child = os.fork()
        if not child:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                COMMANDS[name].check(run)
            except Fault as fault:
                code = 0 if f"{world}/kept cannot be written to" in str(fault) else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_without_exchange_a_crash_between_the_renames_leaves_the_old_one_and_it_comes_back(tmp_path):
    place, made = tmp_path / "base", tmp_path / "base.partial"
    fill(place, COMMANDS["convert"].of_before)
    fill(made, {"weights": "new", "complete.json": MARK})
    place.rename(tmp_path / "base.replaced")  # here it is killed
    output_marks.recover(place, BASE)
    assert (place / "weights").read_text() == "old"
    output_marks.put_in_place(made, place, BASE)
    assert (place / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_file_system_that_cannot_exchange_names_takes_two_steps(tmp_path, monkeypatch):
    class Old:
        def renameat2(self, *arguments) -> int:
            return -1

    monkeypatch.setattr(output_marks, "LIBC", Old())
    monkeypatch.setattr(output_marks.ctypes, "get_errno", lambda: output_marks.errno.EINVAL)
    place, made = tmp_path / "base", tmp_path / "base.partial"
    fill(place, COMMANDS["convert"].of_before)
    fill(made, {"weights": "new", "complete.json": MARK})
    output_marks.put_in_place(made, place, BASE)
    assert (place / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_removal_that_is_cut_short_can_be_gone_on_with(tmp_path, monkeypatch):
    folder = tmp_path / "base.partial"
    fill(folder, COMMANDS["convert"].of_before | {"iter_0000000/a": "1"})
    (folder / "complete.json").write_text(json.dumps(json.loads(MARK) | {"files": {"weights": 3, "iter_0000000/a": 1}}))
    monkeypatch.setattr(output_marks.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        output_marks.remove(folder, BASE)
    monkeypatch.undo()
    assert output_marks.is_made(folder, BASE)
    output_marks.remove(folder, BASE)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("marked", [True, False])
def test_half_made_output_is_removed_from_a_full_disk(marked, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        folder = small / "base.partial"
        if marked:
            output_marks.begin(folder, BASE)
            fill(folder, {"half": "of it"})
        else:
            fill(folder, COMMANDS["convert"].of_before)
        with pytest.raises(OSError, match="No space left"):
            (folder / "weights").write_bytes(bytes(1 << 20))
        output_marks.remove(folder, BASE)
        assert not [*small.iterdir()]
    finally:
        subprocess.run(["umount", small], check=True)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_models.make_model("llama", tmp_path / "model")
    return tmp_path / "model"


def test_the_commands_leave_alone_what_is_not_theirs(model, tmp_path):
    """By the real command lines, as users typed them: each of these has deleted something."""
    fill(tmp_path / "mine", {"thesis.tex": "years of work"})
    lines = "".join(json.dumps({"input": f"question {n}", "output": f"answer {n}"}) + "\n" for n in range(200))
    fill(tmp_path / "rows", {"rows.jsonl": lines})
    fill(tmp_path / "by-hand", {"training.jsonl": lines})
    (tmp_path / "file").write_text("a file")
    before = tree(tmp_path)
    mine = f"paths.base={tmp_path}/mine"
    tried = [
        (("trainer.convert", mine), "mine: contains thesis.tex, not written by python -m trainer.convert"),
        (("trainer.convert", f"paths.base={model}"), "paths.base: .*/model: is paths.model as well"),
        (("trainer.convert", f"paths.base={tmp_path}/file"), "paths.base: .*/file: a file is there, not a folder"),
        (("trainer.prepare", f"data.source={tmp_path}/rows", f"paths.data={tmp_path}/rows"), "is data.source as well"),
        (("trainer.prepare", f"paths.data={tmp_path}/by-hand"), r"contains rows of the user \(training.jsonl\)"),
    ]
    for arguments, said in tried:
        result = command(arguments[0], "tiny", f"paths.model={model}", f"paths.logs={tmp_path}/logs", *arguments[1:])
        assert result.returncode == 2, result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
        assert re.search(said, result.stderr), result.stderr
        assert tree(tmp_path) == before, arguments


def test_evaluation_marks_its_folder_until_its_results_do(tmp_path):
    folder = output_marks.take(tmp_path / "evaluation", EVALUATION)
    write_atomically(folder / "results.json", json.dumps({"metrics": {}, "rows": {}, "samples": {}}), durable=True)
    output_marks.finished(folder)
    assert output_marks.is_made(folder, EVALUATION)
    assert [path.name for path in folder.iterdir()] == ["results.json"]
