"""tasks/run/artifact.py, in a folder and in S3 (moto's server): what is made once, made again, and why."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.faults import Fault, Stopped
from tasks.run import artifact
from tasks.run.artifact import RECORD, Artifact, Missing, Stage, canonical
from tasks.store import open_store
from tests.support import s3_server
from tests.tasks.run.toy_stage import STAGE, get_or_make, makings

ROOT = Path(__file__).parents[3]
DOWNSTREAM = Stage("after", 1, {}, {"toy": STAGE.fingerprint})


@pytest.fixture
def s3(s3_url, monkeypatch):
    _, bucket = s3_server.bucket_of_test(s3_url, monkeypatch)
    return open_store(f"s3://{bucket}/prefix")


@pytest.fixture
def file(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture(params=["file", "s3"])
def store(request):
    return request.getfixturevalue(request.param)


def text(store, made: Artifact, cache: Path) -> str:
    return (artifact.local(made, store, cache) / "deep/text").read_text()


# Fingerprints


class Odd:
    pass


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, Path("x"), b"x", {1: 2}, {"a": {None: 1}}, [Odd()], {"a": {1, 2}}, {"a": [1j]}]
)
def test_what_has_no_canonical_text_is_refused(value):
    with pytest.raises(TypeError):
        canonical(value)


def test_canonical_text():
    assert canonical({"b": (1, [None, True]), "a": {"ü": 1e-5, "": {}}}) == canonical(
        {"a": {"": {}, "ü": 0.00001}, "b": [1, (None, True)]}
    )
    assert len({canonical(value) for value in (1, 1.0, True, "1", [1], None, "", [], {}, [[]], [{}])}) == 11


def test_a_fingerprint_comes_from_what_is_asked_for_alone(tmp_path):
    same = Stage("toy", 1, {"optimizer": {"lr": 1e-3}, "size": 3}, {"model": "0123456789abcdef"})
    assert same.fingerprint == STAGE.fingerprint
    code = "from tests.tasks.run.toy_stage import STAGE; print(STAGE.fingerprint)"
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert there.stdout.strip() == STAGE.fingerprint
    others = [replace(STAGE, name="x"), replace(STAGE, version=2), replace(STAGE, inputs={}), replace(STAGE, config={})]
    assert len({stage.fingerprint for stage in [STAGE, *others]}) == 5


def test_drift_is_named_field_by_field(file, tmp_path):
    assert artifact.find(STAGE, file) == Missing("no toy exists yet")
    get_or_make(file, tmp_path)
    now = replace(STAGE, version=2, config={"size": 3.0, "optimizer": {"lr": 0.002}, "rows": None, "targets": ["a"]})
    assert artifact.differences(STAGE, replace(now, inputs={"data": "ff"})) == [
        "code version: 1 -> 2",
        'input data: absent -> "ff"',
        'input model: "0123456789abcdef" -> absent',
        "optimizer.lr: 0.001 -> 0.002",
        "rows: absent -> null",
        "size: 3 -> 3.0",
        'targets[0]: absent -> "a"',
    ]
    found = artifact.find(now, file)
    assert found.reason.startswith(f"differs from {STAGE.key}: code version: 1 -> 2; optimizer.lr: 0.001 -> 0.002; ")
    assert found.reason.endswith(" and 1 more")


@pytest.mark.parametrize(
    "was, now", [([], {}), ([], None), ([["x"]], [[]]), (1, True), ("1", 1), (0.1, 0.1 + 1e-17 + 3e-17)]
)
def test_other_fingerprints_always_differ_in_a_field(was, now):
    a, b = (replace(STAGE, config={"key": value}) for value in (was, now))
    assert bool(artifact.differences(a, b)) == (a.fingerprint != b.fingerprint)


def test_the_most_similar_is_compared_with(file, tmp_path):
    near, far = replace(STAGE, config={**STAGE.config, "x": 1}), replace(STAGE, config={"y": 1}, inputs={})
    for stage in (near, far):
        get_or_make(file, tmp_path, stage=stage)
    assert artifact.nearest(STAGE, file).key == near.key


# Hits and misses


def test_made_once_and_found_again(store, tmp_path):
    made = get_or_make(store, tmp_path)
    again = get_or_make(store, tmp_path)
    assert (made.cached, again.cached) == (False, True)
    assert replace(again, cached=False) == made
    assert makings(tmp_path) == ["toy"]
    assert made.result == {"length": 4} and made.size == 12
    assert text(store, again, tmp_path / "cache") == "made"
    assert list((tmp_path / "work").iterdir()) == []
    assert store.keys(STAGE.key).keys() == {"artifact.json", "files/deep/text", "files/constant"}  # no lease


def test_a_tuple_in_a_configuration_is_found_again(file, tmp_path):
    """It comes back from the record as a list."""
    stage = replace(STAGE, config={"targets": ("a", "b"), "none": ()})
    get_or_make(file, tmp_path, stage=stage)
    assert get_or_make(file, tmp_path, stage=stage).cached


def flip(path: Path) -> None:
    facts = path.stat()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as f:
        f.write(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


DAMAGE = {
    "deleted": Path.unlink,
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, 2),
    "grown": lambda path: path.write_text(path.read_text() + "more"),
    "replaced": lambda path: (path.unlink(), path.write_text("MADE")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_made_again_and_nothing_else(file, tmp_path, damage):
    for stage in (STAGE, DOWNSTREAM):
        get_or_make(file, tmp_path, stage=stage)
    damage(tmp_path / "store" / STAGE.key / "files/deep/text")
    assert isinstance(artifact.find(STAGE, file), Missing)
    assert get_or_make(file, tmp_path, stage=DOWNSTREAM).cached
    again = get_or_make(file, tmp_path)
    assert not again.cached and text(file, again, tmp_path) == "made"
    assert makings(tmp_path) == ["toy", "after", "toy"]
    assert get_or_make(file, tmp_path).cached and get_or_make(file, tmp_path, stage=DOWNSTREAM).cached


@pytest.mark.parametrize(
    "write", [lambda s, key: s.remove(key), lambda s, key: s.write(key, b"MADE")], ids=["gone", "other"]
)
def test_the_same_in_s3(s3, tmp_path, write):
    for stage in (STAGE, DOWNSTREAM):
        get_or_make(s3, tmp_path, stage=stage)
    write(s3, f"{STAGE.key}/files/deep/text")
    assert artifact.find(STAGE, s3).reason in ("deep/text: missing", "deep/text: content differs")
    assert get_or_make(s3, tmp_path, stage=DOWNSTREAM).cached
    assert not get_or_make(s3, tmp_path).cached
    assert get_or_make(s3, tmp_path).cached
    assert makings(tmp_path) == ["toy", "after", "toy"]


RECORDS = {
    "empty": b"",
    "not JSON": b'{"stage": ',
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "newer": lambda record: record["stage"].update(format=2),
    "no files": lambda record: record.update(files={}),
    "files of another kind": lambda record: record.update(files=[1, 2]),
    "a file less": lambda record: record["files"].pop("constant"),
    "a digest changed": lambda record: record["files"]["constant"].update(sha256="0" * 64),
    "another's": lambda record: record["stage"]["config"].update(size=4),
    "of nothing known": lambda record: record.update(made=None),
    "without a time": lambda record: record["made"].pop("at"),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record_is_no_record(file, tmp_path, record):
    get_or_make(file, tmp_path)
    content = json.loads(file.read(f"{STAGE.key}/{RECORD}")[0])
    if not isinstance(record, bytes):
        record(content)
        record = json.dumps(content).encode()
    file.write(f"{STAGE.key}/{RECORD}", record)
    assert artifact.find(STAGE, file) == Missing("its record is damaged")
    assert list(artifact.every(file)) == []
    assert not get_or_make(file, tmp_path).cached
    assert get_or_make(file, tmp_path).cached


def test_names_in_a_record_that_lead_out_are_not_followed(file, tmp_path):
    """Whoever can write to the store still cannot have a file of this host read or written."""
    made = get_or_make(file, tmp_path)
    (tmp_path / "secret").write_text("constant")
    files = {"../../../../secret": made.files["constant"]}
    file.write(f"{STAGE.key}/{RECORD}", artifact._encode(replace(made, files=files)))
    assert artifact.find(STAGE, file) == Missing("../../../../secret: missing")


# Making


def test_what_fails_leaves_no_record_and_is_gone_on_with(store, tmp_path):
    def breaks(work):
        (work.folder / "half").write_text("half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        get_or_make(store, tmp_path, then=breaks)
    assert store.keys("") == {}  # the lease was released too
    seen = []
    get_or_make(store, tmp_path, then=lambda work: seen.append((work.folder / "half").read_text()))
    assert seen == ["half"]
    assert not list((tmp_path / "work").iterdir())


def test_making_nothing_is_a_fault(file, tmp_path):
    with pytest.raises(Fault, match=r"toy/\w+: the stage wrote no files"):
        artifact.get_or_make(STAGE, file, lambda work: {}, tmp_path / "work", print, {})
    assert isinstance(artifact.find(STAGE, file), Missing)


def test_anew(store, tmp_path):
    get_or_make(store, tmp_path, "first")
    again = get_or_make(store, tmp_path, "second", make_again=True)
    assert not again.cached and text(store, again, tmp_path / "cache") == "second"
    assert makings(tmp_path) == ["toy", "toy"]


def test_anew_begins_anew_and_then_goes_on(file, tmp_path):
    """What a finished attempt failed to remove is no start; what a failed one left is."""
    made = get_or_make(file, tmp_path)
    left = tmp_path / "work" / made.key.replace("/", "-") / "files/left"
    left.parent.mkdir(parents=True)
    left.write_text("of old")

    def breaks(work):
        assert not left.exists()
        left.write_text("half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        get_or_make(file, tmp_path, then=breaks, make_again=True)
    assert "left" in get_or_make(file, tmp_path, make_again=True).files


def run(store, folder, mode, **variables):
    environment = os.environ | {"RENEWED": "1", "EXPIRES": "5", "POLLED": "0.05"} | variables
    command = [sys.executable, ROOT / "tests/tasks/run/toy_stage.py", store.uri, folder, mode]
    return subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_killed_between_the_files_and_the_record(store, tmp_path):
    assert run(store, tmp_path, "killed-before-the-record").returncode == -signal.SIGKILL
    assert "files/deep/text" in store.keys(STAGE.key)
    assert isinstance(artifact.find(STAGE, store), Missing)
    assert not get_or_make(store, tmp_path).cached
    assert get_or_make(store, tmp_path).cached


def test_killed_while_it_is_made_again(file, tmp_path):
    """The old record must not vouch for a mixture."""
    get_or_make(file, tmp_path, "old!")
    flip(tmp_path / "store" / STAGE.key / "files/constant")
    assert run(file, tmp_path, "killed-before-the-record").returncode == -signal.SIGKILL
    assert isinstance(artifact.find(STAGE, file), Missing)


def test_stopped_while_somebody_else_makes_it(file, tmp_path):
    def then(work):
        with pytest.raises(Stopped):
            get_or_make(file, tmp_path, stop=lambda: True)

    get_or_make(file, tmp_path, then=then)
    assert makings(tmp_path) == ["toy"]


# Local copies


def test_a_folder_needs_no_copy(file, tmp_path):
    made = get_or_make(file, tmp_path)
    assert artifact.local(made, file, tmp_path / "cache") == tmp_path / "store" / made.key / "files"


LOCAL = DAMAGE | {
    "folder removed": lambda path: shutil.rmtree(path.parents[1]),
    "stamps removed": lambda path: path.parents[1].with_name(f"{path.parents[1].name}.json").unlink(),
    "stamps cut": lambda path: os.truncate(path.parents[1].with_name(f"{path.parents[1].name}.json"), 10),
}


def test_a_copy_is_fetched_once(s3, tmp_path, monkeypatch):
    made, fetched, get = get_or_make(s3, tmp_path), [], type(s3).get
    monkeypatch.setattr(type(s3), "get", lambda *rest: (fetched.append(1), get(*rest)))
    assert [text(s3, made, tmp_path / "cache") for _ in range(3)] == ["made"] * 3
    assert fetched == [1]


@pytest.mark.parametrize("damage", LOCAL.values(), ids=LOCAL)
def test_a_damaged_copy_is_fetched_again(s3, tmp_path, damage):
    made = get_or_make(s3, tmp_path)
    damage(artifact.local(made, s3, tmp_path / "cache") / "deep/text")
    assert text(s3, made, tmp_path / "cache") == "made"


def test_what_was_made_anew_replaces_the_copy_with_all_its_files(s3, tmp_path):
    """A shard that is left over would be loaded with the others."""
    first = get_or_make(s3, tmp_path, then=lambda work: (work.folder / "files/deep/third").write_text("3"))
    assert (artifact.local(first, s3, tmp_path / "cache") / "deep/third").exists()
    second = get_or_make(s3, tmp_path, "next", make_again=True)
    assert text(s3, second, tmp_path / "cache") == "next"
    assert not (artifact.local(second, s3, tmp_path / "cache") / "deep/third").exists()


def test_importing_it_is_cheap():
    code = "import sys, tasks.run.artifact; sys.exit(bool({'boto3', 'numpy', 'prefect', 'pydantic'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
