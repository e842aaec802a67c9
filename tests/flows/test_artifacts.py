"""flows/artifacts.py: what lies in the store is listed, shown, checked, and removed only when nothing refers to it."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract import ownership
from flows import artifacts
from tasks.gang.board import Board
from tasks.gang.copies import Copies, encoded, part
from tasks.run import artifact, lease
from tasks.run.artifact import RECORD, Artifact, Stage
from tasks.store import File, open_store

ROOT = Path(__file__).parents[2]
DAY = 86400


@pytest.fixture
def world(tmp_path, monkeypatch, capsys):
    """A store with three artifacts: train is made from convert and prepare."""
    monkeypatch.setenv("FINETUNE_STORE", str(tmp_path / "store"))
    store = open_store(str(tmp_path / "store"))

    def make(name: str, config: dict, **inputs: Artifact) -> Artifact:
        stage = Stage(name, 1, config, {key: made.stage.fingerprint for key, made in inputs.items()})

        def fill(work):
            (work.folder / "files/content").write_text(f"{name} {config}")
            results = {"evaluate": {"metrics": {"arc/acc": 0.25, "arc/acc_stderr": 0.1}}}
            results |= {"reinforce": {"reward": 0.8, "held_out_before": 0.02, "held_out_after": 0.94}}
            return results.get(name, {"loss": 0.5})

        by = {"flow": "toy-1", "run": "toy"}
        return artifact.get_or_make(stage, store, fill, tmp_path / "work", lambda _: None, by)

    def note(name: str, *made: Artifact, days: float = 0, folder: str = "runs"):
        content = {"artifacts": [one if isinstance(one, str) else one.key for one in made]}
        store.write(f"{folder}/{name}.json", json.dumps(content | {"started": time.time() - days * DAY}).encode())

    def run(*arguments: str):
        code = artifacts.main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    convert, prepare = make("convert", {"dtype": "bf16"}), make("prepare", {"rows": 9})
    train = make("train", {"lr": 0.1}, base=convert, data=prepare)
    world = SimpleNamespace(store=store, make=make, note=note, run=run, root=tmp_path / "store")
    world.convert, world.prepare, world.train = convert, prepare, train
    return world


def there(world) -> set[str]:
    return {made.stage.name for made in artifact.every(world.store)}


@pytest.mark.timeout(60)
def test_a_store_that_never_answers_is_reported_while_the_command_waits(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts connections; nobody answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {"FINETUNE_STORE": "s3://bucket", "AWS_ENDPOINT_URL": url, "FINETUNE_RUNS": str(tmp_path)}
        variables |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        command = [sys.executable, "-m", "flows.artifacts", "list"]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                readable, _, _ = select.select([process.stderr], [], [], 40)
                assert readable, "40 s without output"
                assert process.stderr and f"waiting for s3://bucket at {url}" in process.stderr.readline()
            finally:
                process.kill()


def test_a_store_that_is_no_folder_is_one_line(world, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINETUNE_STORE", f"{tmp_path}/file/store")
    said = f"error: {tmp_path}/file/store: Not a directory; {tmp_path}/file/store must be a writable folder\n"
    for arguments in (["list"], ["list", "train"], ["show", "train/6a8e"], ["verify"], ["gc"]):
        assert world.run(*arguments) == (2, "", said)


def test_list_says_what_changed_since_the_one_before_and_the_score(world):
    world.make("evaluate", {"task": "arc"}, trained=world.train)
    other = world.make("train", {"lr": 0.2}, base=world.convert, data=world.prepare)
    world.make("evaluate", {"task": "arc"}, trained=other)
    lines = world.run("list")[1].splitlines()
    assert "toy  loss 0.5  by toy-1" in lines[2] and "toy  arc/acc 0.25  by toy-1" in lines[3]
    assert [line.strip() for line in (lines[5], lines[7])] == ["lr: 0.1 -> 0.2"] * 2, "also of what was made from it"
    assert [line.strip() for line in world.run("list", "evaluate")[1].splitlines()][2] == "lr: 0.1 -> 0.2"


def test_list(world):
    code, output, _ = world.run("list")
    lines = output.splitlines()
    assert code == 0 and len(lines) == 4
    assert all(f"{made.key} " in output for made in (world.convert, world.prepare, world.train))
    assert "by toy-1" in lines[0] and lines[-1].startswith("3 artifacts, ") and lines[-1].endswith(world.store.uri)
    assert world.run("list", "train")[1].splitlines()[-1].startswith("1 artifacts, ")
    assert world.run("list", "export")[1].startswith("0 artifacts, 0 B")


@pytest.mark.parametrize("stage, says", [("trian", "did you mean train?"), ("evaluate-base", "evaluate"), ("runs", "")])
def test_a_stage_that_is_none_is_named(world, stage, says):
    code, out, err = world.run("list", stage)
    assert code == 2 and not out and err.startswith(f"error: {stage}: not a stage") and says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("days", ["-1", "nan", "inf", "-inf", "soon"])
def test_days_that_are_none_remove_nothing(world, days, capsys):
    with pytest.raises(SystemExit) as ended:
        world.run("gc", "--delete", f"--days={days}")
    assert ended.value.code == 2 and f"{days}: not a number of days" in capsys.readouterr().err.splitlines()[-1]
    assert there(world) == {"convert", "prepare", "train"}


def test_list_has_what_a_reinforcement_learning_has_come_to(world):
    world.make("reinforce", {"lr": 1})
    assert "reward 0.8, held out before 0.02, after 0.94" in world.run("list", "reinforce")[1]


def test_show_has_what_it_came_from_and_what_came_of_it(world):
    code, output, _ = world.run("show", world.train.key)
    assert code == 0
    assert f"  base: {world.convert.key}\n" in output and f"  data: {world.prepare.key}\n" in output
    assert "used by\n  nothing\n" in output and '"lr": 0.1' in output and '"loss": 0.5' in output
    assert world.train.files["content"].sha256[:16] in output
    assert f"used by\n  {world.train.key}\n" in world.run("show", world.convert.key)[1]


def test_show_takes_the_part_that_tells_it_apart(world):
    fingerprint = world.train.stage.fingerprint
    assert world.train.key in world.run("show", fingerprint[:10])[1]
    assert world.train.key in world.run("show", "tr")[1]
    assert world.train.key in world.run("show", f"{world.train.key}/")[1]  # as a shell completes a folder
    code, output, errors = world.run("show", "zzz")
    assert (code, output) == (2, "") and errors.startswith("error: zzz: names 0 artifacts: none; ")
    world.make("train", {"lr": 0.2})
    code, _, errors = world.run("show", "train")
    assert code == 2 and errors.startswith("error: train: names 2 artifacts: train/") and errors.count("\n") == 1


def test_an_input_that_is_gone_is_said_to_be(world):
    world.store.delete(world.convert.key)
    assert f"base: {world.convert.stage.fingerprint} (deleted)" in world.run("show", "train")[1]


def test_verify(world):
    assert world.run("verify")[:2][0] == 0
    assert world.run("verify")[1].endswith("all as recorded\n")
    path = world.root / world.train.key / "files/content"
    facts = path.stat()
    path.write_text(path.read_text().upper())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    code, output, _ = world.run("verify")
    assert code == 1 and f"{world.train.key}  content: content differs\n" in output and "1 of 3 damaged" in output
    assert world.run("verify", world.prepare.key)[0] == 0
    assert world.run("verify", world.prepare.key, world.train.key)[0] == 1


def test_a_base_is_not_proven_whose_release_is_gone(world):
    code, output, errors = world.run("verify", world.convert.key)
    assert code == 2 and output.endswith("all as recorded\n")
    assert errors == f"error: {world.convert.key}: its inputs are no longer in the store: download\n"


def test_verify_sees_a_damaged_record(world):
    world.store.write(f"{world.train.key}/{RECORD}", b"{")
    code, output, _ = world.run("verify")
    assert code == 1 and f"{world.train.key}  its record is damaged\n" in output and "1 of 3 damaged" in output


def test_gc_is_dry_unless_told(world):
    before = world.store.keys("")
    code, output, _ = world.run("gc")
    assert code == 0 and output.count("would remove ") == 3 and output.endswith("can be freed with --delete\n")
    assert world.store.keys("") == before
    code, output, _ = world.run("gc", "--delete")
    assert code == 0 and output.count("removes ") == 3 and output.endswith("freed\n")
    assert world.store.keys("") == {}
    assert world.run("gc", "--delete")[1] == "0 B freed\n"


@pytest.mark.parametrize("folder", ["runs", "pins"])
def test_what_is_referred_to_stays_with_its_inputs(world, folder):
    world.make("convert", {"dtype": "fp32"})
    world.note("x", world.train, folder=folder)
    world.run("gc", "--delete")
    assert there(world) == {"convert", "prepare", "train"}
    assert len(list(artifact.every(world.store, "convert"))) == 1
    world.store.remove(f"{folder}/x.json")
    world.note("x", world.convert, folder=folder)
    world.run("gc", "--delete")
    assert there(world) == {"convert"}


def test_old_runs_refer_to_nothing_when_asked(world):
    world.note("old", world.train, days=10)
    world.note("new", world.prepare, days=3)
    world.note("model-1", world.convert, days=99, folder="pins")
    world.run("gc", "--delete")
    assert there(world) == {"convert", "prepare", "train"}
    world.run("gc", "--days", "20", "--delete")
    assert there(world) == {"convert", "prepare", "train"}
    world.run("gc", "--days", "5")
    assert world.store.keys("runs").keys() == {"old.json", "new.json"}  # dry
    world.run("gc", "--days", "5", "--delete")
    assert there(world) == {"convert", "prepare"} and world.store.keys("runs").keys() == {"new.json"}
    world.run("gc", "--days", "0", "--delete")
    assert there(world) == {"convert"}


def test_what_is_being_made_stays(world):
    with lease.hold(world.store, "export/0123456789abcdef/lease.json", lambda _: None, "toy-2"):
        world.store.write("export/0123456789abcdef/files/half", b"half")
        output = world.run("gc", "--delete")[1]
        assert f"keeps export/0123456789abcdef: toy-2 (process {os.getpid()} on " in output
        assert world.store.read("export/0123456789abcdef/files/half")
    world.run("gc", "--delete")
    assert world.store.keys("") == {}


def test_a_run_that_makes_something_now_is_never_old(world):
    """A training of weeks reads what was made when it began."""
    world.note("long", world.convert, world.prepare, "train/fedcba9876543210", days=30)
    with lease.hold(world.store, "train/fedcba9876543210/lease.json", lambda _: None):
        world.run("gc", "--days", "7", "--delete")
        assert there(world) == {"convert", "prepare"} and "long.json" in world.store.keys("runs")
    world.run("gc", "--days", "7", "--delete")
    assert there(world) == set()


def test_a_run_that_can_resume_from_a_checkpoint_in_the_store_is_never_old(world):
    """Its flow has died, and its hosts have lost their disks."""
    copies = Copies(world.store, "train-fedcba9876543210")
    world.store.write(f"{copies.files}/checkpoints/iter_0000010/x", b"x")
    board = Board(world.store, copies.gang, 1)
    board.write(part(10, 0), encoded({"x": File(1, "", "")}))
    copies.complete(10, board, [0])
    world.note("long", world.convert, world.prepare, "train/fedcba9876543210", days=30)
    world.run("gc", "--days", "7", "--delete")
    assert there(world) == {"convert", "prepare"} and "long.json" in world.store.keys("runs")
    assert copies.newest() == 10 and world.store.read(f"{copies.files}/checkpoints/iter_0000010/x")
    world.run("gc", "--days", "0", "--delete")
    assert world.store.keys("") == {}


def test_what_a_dead_process_left_goes(world):
    dead = {"id": "x", "about": "", "host": "here", "pid": 2**22 + 1, "started": "1", "boot": ownership.boot()}
    for name, content in (("d" * 16, json.dumps(dead).encode()), ("e" * 16, b"")):
        world.store.write(f"train/{name}/files/half", b"half")
        world.store.write(f"train/{name}/lease.json", content)
    world.run("gc", "--delete")
    assert world.store.keys("") == {}


def test_what_no_stage_has_made_stays(world):
    """A store in a folder that holds other things, as FINETUNE_STORE=~ does."""
    kept = [
        "thesis/figures/one.svg",
        "train/notes/today.txt",
        "convert/0123456789abcdeg/files/x",
        "gangs/train-1/x",
        "a",
    ]
    kept.append(f"{world.train.key}/notes.txt")
    for name in kept:
        (world.root / name).parent.mkdir(parents=True, exist_ok=True)
        (world.root / name).write_text("years of work")
    _, output, _ = world.run("gc", "--days", "0", "--delete")
    assert "leaves 3 folders that no stage has written, such as convert/0123456789abcdeg" in output
    assert sorted(world.store.keys("")) == sorted(kept)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"artifacts": 7}', b"null"])
def test_nothing_goes_while_a_reference_cannot_be_read(world, content):
    world.store.write("runs/x.json", content)
    before = world.store.keys("")
    code, _, errors = world.run("gc", "--delete")
    assert code == 2 and "runs/x.json: damaged; remove it" in errors and errors.count("\n") == 1
    assert world.store.keys("") == before


def test_as_a_command(world):
    command = [sys.executable, "-m", "flows.artifacts", "list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 4
