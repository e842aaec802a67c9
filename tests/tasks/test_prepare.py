"""tasks/rows.py and tasks/prepare.py's write(): rows from files and from a stand-in for the Hub, checked and split."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from tasks import prepare, rows
from tasks.faults import Fault
from tasks.hub import api
from tests import stand_in_hub

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on a loopback port, and no token of whoever runs the tests."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "agents").write_text('{"harnesses": {}}')
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"))
    monkeypatch.setattr(api, "WAITS", (0.01,) * 6)
    with stand_in_hub.serve(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def read_elsewhere(*asked) -> list:
    """What rows.read finds for each pair of settings and commit, or its fault: the libraries read HF_ENDPOINT once."""
    code = """
import json, sys
from conf.sections import Data
from tasks import rows
for settings, commit in json.load(sys.stdin):
    try:
        print(json.dumps(list(rows.read(Data(**settings), commit))))
    except rows.Fault as fault:
        print(json.dumps(str(fault)))
"""
    asked = json.dumps([(settings.model_dump(mode="json"), commit) for settings, commit in asked])
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def data(source, **changes):
    settings = {"source": str(source), "validation": 0.1, "test": 0.1} | changes
    return load("tiny").data.model_copy(update=settings)


def written(path: Path, pairs, form=json.dumps) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(form({"input": a, "output": b}) + "\n" for a, b in pairs))
    return path


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    random.seed(seed)
    return [(f"question {seed} {i} {random.random()}", f"answer {i}") for i in range(count)]


def splits(folder: Path) -> dict[str, list[tuple[str, str]]]:
    found = {}
    for name in rows.SPLITS:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        found[name] = [(row["input"], row["output"]) for row in map(json.loads, lines)]
    return found


def write(source, folder: Path, commit: str | None = None, **changes) -> dict[str, list[tuple[str, str]]]:
    folder.mkdir()
    made = prepare.write(data(source, **changes), commit, folder)
    found = splits(folder)
    assert made == {"rows": {name: len(found[name]) for name in rows.SPLITS}}
    return found


def together(found: dict[str, list]) -> list:
    return [pair for name in rows.SPLITS for pair in found[name]]


GOOD = '{"input": "a", "output": "b"}\n'


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"input": "a", "output": "b"} more', "not JSON"),
        (b'{"input": "\xff", "output": "b"}', "not UTF-8 at byte 11"),
        (b'["a", "b"]', r'\["a", "b"\] is no object with columns'),
        (b"null", "null is no object"),
        (b"{}", r"no column input \(data.input\); there are none"),
        (b'{"input": "a", "answer": "b"}', r"no column output \(data.output\); there are input, answer"),
        (b'{"input": 7, "output": "b"}', "input: 7 is no text"),
        (b'{"input": "a", "output": null}', "output: null is no text"),
        (b'{"input": ["' + b"a" * 99 + b'"], "output": "b"}', r"input: \[.a{58}\.\.\. is no text"),
        (b'{"input": " \\n", "output": "b"}', "input: empty"),
        (b'{"input": "a", "output": "x \\ud800"}', "output: half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, line, complaint):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD.encode() + b"\n" + line + b"\n")
    with pytest.raises(Fault, match=f"^{file}:3: {complaint}") as caught:
        list(rows.read(data(file), None))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_all_that_unicode_has_comes_through(tmp_path):
    texts = [
        "grün",
        "😀👩‍👩‍👧",
        "a\u2028b\u2029c\x85d",
        "\u0000\x01",
        "עברית",
        "e\u0301 é",
        "line\nline\r\n",
        "﷐",
        "\ufeffx",
    ]
    source = [(text, text) for text in texts]
    file = written(tmp_path / "rows.jsonl", source)
    assert list(rows.read(data(file), None)) == source
    file.write_text("\ufeff" + file.read_text())  # a byte order mark, as some editors write
    assert list(rows.read(data(file), None)) == source
    prepare.write(data(file, validation=0.0, test=0.0), None, tmp_path)
    lines = (tmp_path / "training.jsonl").read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["input"] for line in lines] == texts


def test_a_folder_of_files_in_order(tmp_path):
    first, second = pairs(3, 1), pairs(3, 2)
    written(tmp_path / "data/b.jsonl", second)
    written(tmp_path / "data/a.jsonl", first)
    (tmp_path / "data/README.md").write_text("not data")
    assert list(rows.read(data(tmp_path / "data"), None)) == first + second


def test_content_is_what_identifies_files(tmp_path):
    here, there = written(tmp_path / "here/x.jsonl", pairs(3)), written(tmp_path / "there/y.jsonl", pairs(3))
    assert rows.content(str(here)) == rows.content(str(there)) == rows.content(str(there.parent))
    there.write_text(there.read_text() + " ")
    assert rows.content(str(here)) != rows.content(str(there))


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Fault, match=r"data\.source: .*empty: no \*\.jsonl in this folder"):
        rows.content(str(tmp_path / "empty"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(Fault, match="Is a directory"):
        rows.content(str(tmp_path))
    run = load("tiny", ["data.source=tiny://letters"])
    with pytest.raises(Fault, match=r"tiny://letters: no such data; there is tiny://tickets"):
        prepare.stage(run)


# Splits


def test_shares_are_about_right_and_every_row_is_in_one(tmp_path):
    source = pairs(5000)
    found = write(written(tmp_path / "rows.jsonl", source), tmp_path / "out", validation=0.2, test=0.05)
    assert 900 < len(found["validation"]) < 1100 and 200 < len(found["test"]) < 300
    assert sorted(together(found)) == sorted(source)


def test_rows_that_are_added_move_no_other(tmp_path):
    source, more = pairs(300), pairs(300, 1)
    before = write(written(tmp_path / "a.jsonl", source), tmp_path / "a")
    mixed = [pair for both in zip(more, reversed(source), strict=True) for pair in both]
    after = write(written(tmp_path / "b.jsonl", mixed), tmp_path / "b")
    for name in rows.SPLITS:
        assert set(before[name]) == set(after[name]) & set(source)


def test_the_same_row_twice_is_on_one_side(tmp_path):
    """Else what is trained on would be tested with."""
    found = write(written(tmp_path / "a.jsonl", pairs(200) * 3), tmp_path / "a")
    assert not set(found["training"]) & set(found["test"])
    assert not set(found["training"]) & set(found["validation"])


def test_a_larger_share_keeps_what_was_in_the_test(tmp_path):
    file = written(tmp_path / "a.jsonl", pairs(300))
    small, large = write(file, tmp_path / "a"), write(file, tmp_path / "b", test=0.2)
    assert set(small["test"]) < set(large["test"])


def test_a_split_without_rows_is_a_fault(tmp_path):
    file = written(tmp_path / "a.jsonl", pairs(3))
    with pytest.raises(Fault, match=r"no row of 3 falls to (validation|test); take more rows or a larger share"):
        write(file, tmp_path / "a", validation=0.001, test=0.001)
    assert len(write(file, tmp_path / "b", validation=0.0, test=0.0)["training"]) == 3
    file.write_text("\n \n")
    with pytest.raises(Fault, match="has no rows"):
        write(file, tmp_path / "c")


def test_a_limit_takes_the_same_rows_in_whatever_order(tmp_path):
    source = pairs(400)
    shuffled = random.Random(5).sample(source, 400)
    found = write(written(tmp_path / "a.jsonl", source), tmp_path / "a", rows=100)
    again = write(written(tmp_path / "b.jsonl", shuffled), tmp_path / "b", rows=100)
    chosen = together(found)
    assert len(chosen) == 100 and sorted(chosen) == sorted(together(again))
    assert found["training"] == [pair for pair in source if pair in set(found["training"])]  # the source's order
    fewer = write(written(tmp_path / "c.jsonl", source), tmp_path / "c", rows=60)
    assert set(together(fewer)) < set(chosen)
    everything = write(written(tmp_path / "d.jsonl", source), tmp_path / "d", rows=10_000)
    assert len(together(everything)) == 400


def test_a_limit_does_not_favour_a_split(tmp_path):
    found = write(written(tmp_path / "a.jsonl", pairs(4000)), tmp_path / "a", rows=1000)
    assert 65 < len(found["test"]) < 140 and 65 < len(found["validation"]) < 140


def test_the_same_rows_always_fall_the_same_way(tmp_path):
    """A golden value: another hash would move rows between the test and the training of those who come again."""
    found = write(written(tmp_path / "a.jsonl", pairs(100)), tmp_path / "a")
    assert hashlib.sha256(repr(sorted(found["test"])).encode()).hexdigest()[:8] == "10a2e212"


# The Hub


def test_a_data_set_of_the_hub(hub, tmp_path):
    source = pairs(200)
    written(tmp_path / "set/train.jsonl", source, lambda row: json.dumps({"q": row["input"], "a": row["output"]}))
    commit = hub.publish("datasets/org/data", tmp_path / "set")
    settings = data("org/data", input="q", output="a")
    assert rows.commit(settings) == commit
    written(tmp_path / "set/train.jsonl", pairs(10, 3), lambda row: json.dumps({"q": row["input"], "a": row["output"]}))
    assert hub.publish("datasets/org/data", tmp_path / "set") == rows.commit(settings) != commit
    others = [data("org/data"), data("org/data", split="tset"), data("org/data", config="en"), data("org/absent")]
    found, *faults = read_elsewhere((settings, commit), *[(other, commit) for other in others])
    assert [tuple(row) for row in found] == source  # the branch has moved, the commit is the same
    assert faults[0] == "org/data train row 1: no column input (data.input); there are q, a"
    for fault, named in zip(faults[1:], ("tset", "en", "org/absent"), strict=True):
        assert fault.startswith("data.source: org/") and named in fault and "\n" not in fault


def test_a_data_set_that_cannot_be_read(hub, tmp_path):
    """Its rows are not of one kind; it has a program in place of rows; it breaks off."""
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/train.jsonl").write_text(GOOD + '{"input": {"x": 1}, "output": [')
    (tmp_path / "script").mkdir()
    (tmp_path / "script/script.py").write_text("raise SystemExit('ran')")
    asked = [
        (data(f"org/{name}"), hub.publish(f"datasets/org/{name}", tmp_path / name)) for name in ("mixed", "script")
    ]
    for fault, name in zip(read_elsewhere(*asked), ("mixed", "script"), strict=True):
        assert isinstance(fault, str) and fault.startswith(f"data.source: org/{name} train") and "\n" not in fault


def test_what_the_hub_refuses(hub, tmp_path):
    written(tmp_path / "set/train.jsonl", pairs(3))
    hub.publish("datasets/org/private", tmp_path / "set", private=True)
    for source in ("org/absent", "org/private"):
        with pytest.raises(Fault, match=rf"^data.source: {source}@main: the Hub says 401; check the name"):
            rows.commit(data(source))
    with pytest.raises(Fault, match="no such file, and no data set's name on the Hub"):
        rows.commit(data("/no/such/file.jsonl"))


def test_a_hub_that_is_away(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Fault, match=r"^data.source: org/data: http://127.0.0.1:9 cannot be reached"):
        rows.commit(data("org/data"))


def test_identity_is_the_commit_and_never_the_place(hub, tmp_path):
    written(tmp_path / "set/train.jsonl", pairs(3))
    commit = hub.publish("datasets/org/data", tmp_path / "set")
    branch, pinned = (
        prepare.stage(load("tiny", ["data.source=org/data", f"data.revision={name}"])) for name in ("main", commit)
    )
    assert branch == pinned and branch.config["commit"] == commit
    here, there = written(tmp_path / "here/x.jsonl", pairs(3)), written(tmp_path / "there/y.jsonl", pairs(3))
    assert prepare.stage(load("tiny", [f"data.source={here}"])) == prepare.stage(load("tiny", [f"data.source={there}"]))
