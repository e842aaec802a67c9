"""trainer/data/read/sources.py: which files a source is, and its rows in numbered chunks; a stand-in serves the
Hub's."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema.data import Part
from contract.faults import Fault
from tests.support import stand_in_hub
from trainer.data.read import formats, sources
from trainer.data.rows import Bad

ROOT = Path(__file__).parents[4]
NAMES = ("a.jsonl", "b.csv", "deep/c.json", "deep/d.jsonl.gz", "e.parquet", "f.arrow")


def nothing(number: int) -> bool:
    return False


def written(path: Path, rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        path.write_text("a,b\n" + "".join(f"{row['a']},{row['b']}\n" for row in rows))
    else:
        path.write_bytes({".gz": gzip.compress(lines), ".json": json.dumps(rows).encode()}.get(path.suffix, lines))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> tuple[Path, list[dict]]:
    """A folder of files in several formats, cut small; and its rows."""
    monkeypatch.setattr(formats, "CHUNK", 700)
    rows = [[{"a": f"{name} {number}", "b": "x" * number} for number in range(70)] for name in NAMES]
    for name, mine in zip(NAMES, rows, strict=True):
        written(tmp_path / "data" / name, mine)
    order = sorted(range(len(NAMES)), key=lambda at: Path(NAMES[at]))
    return tmp_path / "data", [row for at in order for row in rows[at]]


# Which files


def test_a_folder_is_its_files_of_known_formats_in_order(tmp_path):
    wanted = ["a.jsonl", "b/a.csv.zst", "b/c/z.parquet", "b.json"]
    others = [
        ".hidden.jsonl",
        ".git/a.json",
        "README.md",
        "LICENSE.txt",
        "x.idx.parquet",
        "x.jsonl.idx.npy",
        "weights.bin",
    ]
    others += ["dataset_info.json", "b/state.json", "b.json.bak", "archive.tar.gz", "x.jsonl.idx.info"]
    for name in wanted + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in sources.files(str(tmp_path))] == sorted(wanted, key=Path)
    assert sources.files(f"{tmp_path}/?.json*") == [tmp_path / "a.jsonl", tmp_path / "b.json"]
    assert sources.files(f"{tmp_path}/**/*.parquet") == [tmp_path / "b/c/z.parquet", tmp_path / "x.idx.parquet"]
    assert sources.files(str(tmp_path / "b.json")) == [tmp_path / "b.json"]
    assert sources.files(str(tmp_path / "LICENSE.txt")) == [tmp_path / "LICENSE.txt"]


def test_a_link_that_leads_nowhere_is_not_left_out_of_a_folder(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").symlink_to("gone")
    with pytest.raises(Fault, match=r"^data\.source: .*/b\.jsonl: a link to gone, which does not exist$"):
        sources.files(str(tmp_path))


def test_texts_of_a_folder_that_holds_nothing_else(tmp_path):
    for name in ("b.txt.xz", "a.txt", "notes.md"):
        (tmp_path / name).touch()
    assert sources.files(str(tmp_path)) == [tmp_path / "a.txt", tmp_path / "b.txt.xz"]


def test_home_and_what_looks_like_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "org/name/a.jsonl", [{"a": 1}])
    assert sources.files("~/org/name/a.jsonl") == [file]
    assert [sources.is_local(name) for name in ("org/name", "./x", "~/x", "/x", "x*")] == [True] * 5
    assert [sources.is_local(name) for name in ("org/other", "s3://b/p", "tiny://tickets")] == [False] * 3


@pytest.mark.parametrize(
    "source, said",
    [
        ("/nowhere/a.jsonl", "no such file or folder"),
        ("{}/nothing", "no such file or folder"),
        ("{}/*.parquet", "matches no file"),
        ("{}/*.md", r"matches no file that ends in one of \.jsonl"),
        ("{}/a.md", r"ends in none of \.jsonl"),
        ("{}/empty", r"no file in this folder ends in one of \.jsonl, .*\.txt"),
        ("s3://bucket/rows.jsonl", r"only the flow fetches from s3:// \(python -m flows\.finetune\)"),
        (
            "tiny://letters",
            r"no such data; there is tiny://tickets, tiny://mistaken-tickets, tiny://ranked-tickets and tiny://texts",
        ),
        ("https://host/a.jsonl", "not a file, a folder, a data set on the Hub or tiny://tickets"),
    ],
)
def test_sources_that_are_none(tmp_path, source, said):
    (tmp_path / "a.md").touch()
    (tmp_path / "empty").mkdir()
    part = Part(source=source.format(tmp_path))
    for ask in (sources.total, sources.first, lambda part: list(sources.chunks(part, 0, nothing))):
        with pytest.raises(
            Fault, match=rf"^data\.source: {source.format(tmp_path).replace('*', '.')}: {said}"
        ) as caught:
            ask(part)
        assert "\n" not in str(caught.value)


# Chunks


def rows_of(chunks) -> list:
    return [row for chunk in chunks for row in chunk.load().values]


def test_chunks_are_numbered_and_their_sizes_make_up_the_whole(folder):
    path, rows = folder
    part = Part(source=str(path))
    chunks = list(sources.chunks(part, 3, nothing))
    assert [chunk.number for chunk in chunks] == list(range(len(chunks))) and len(chunks) > 30
    assert {chunk.part for chunk in chunks} == {3}
    assert sum(chunk.size for chunk in chunks) == sources.total(part) > 0
    assert min(chunk.size for chunk in chunks) >= 0
    assert rows_of(pickle.loads(pickle.dumps(chunks))) == rows_of(chunks) == rows


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_a_single_file(folder, name):
    part = Part(source=str(folder[0] / name))
    chunks = list(sources.chunks(part, 0, nothing))
    assert sum(chunk.size for chunk in chunks) == sources.total(part) == (folder[0] / name).stat().st_size
    assert list(sources.first(part)[0][0]) == ["a", "b"]


@pytest.mark.parametrize("done", [{0}, {1, 2, 5}, set(range(12)), set(range(0, 99, 2)), set(range(3, 999))])
def test_what_is_done_keeps_its_number_and_comes_without_rows(folder, done):
    part = Part(source=str(folder[0]))
    whole, rest = list(sources.chunks(part, 0, nothing)), list(sources.chunks(part, 0, done.__contains__))
    assert [(chunk.number, chunk.size) for chunk in rest] == [(chunk.number, chunk.size) for chunk in whole]
    for before, after in zip(whole, rest, strict=True):
        if after.number in done:
            assert len(pickle.dumps(after)) < 200
        else:
            assert after.load().values == before.load().values
            assert after.load().place(0) == before.load().place(0)


def test_places_are_right_whatever_order_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 50)
    lines = [("" if number % 7 == 3 else json.dumps({"line": number})) for number in range(1, 200)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    chunks = list(sources.chunks(Part(source=str(file)), 0, nothing))
    for chunk in (*chunks, *reversed(chunks)):
        rows = chunk.load()
        places = [f"{file}:{row['line']}" for row in rows.values if not isinstance(row, Bad)]
        assert [rows.place(at) for at in range(len(rows.values))] == places


# First rows


def test_the_first_good_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    good = [{"b": 1, "a": 2}, *({"a": number, "c": 1} for number in range(40))]
    file.write_text("\n{\n7\n" + "".join(json.dumps(row) + "\n" for row in good))
    assert sources.first(Part(source=str(file))) == (good[:20], f"{file}:4")


def test_first_rows_of_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.csv").write_text("a,b\n")
    written(tmp_path / "d.parquet", [{"a": 1}][:0])
    with pytest.raises(Fault, match=rf"^data\.source: {tmp_path}: has no rows$"):
        sources.first(Part(source=str(tmp_path)))
    assert list(sources.chunks(Part(source=str(tmp_path / "b.json")), 0, nothing)) == []
    (tmp_path / "e.jsonl").write_text("{\n[1]\n")
    with pytest.raises(
        Fault, match=rf"none of its rows can be read; {tmp_path}/e\.jsonl:1: not JSON: Expecting property name"
    ):
        sources.first(Part(source=str(tmp_path)))


def test_tickets():
    part = Part(source="tiny://tickets")
    chunks = list(sources.chunks(part, 1, nothing))
    assert [(chunk.number, chunk.part, chunk.size) for chunk in chunks] == [(0, 1, 0)]
    rows = chunks[0].load()
    assert len(rows.values) == 1600 and rows.place(0) == "tiny://tickets row 1"
    assert list(sources.first(part)[0][0]) == ["input", "output"] and sources.total(part) == 0


def test_mistaken_tickets_are_the_same_and_mostly_wrong():
    right, mistaken = (
        next(sources.chunks(Part(source=name), 0, nothing)).load() for name in (sources.TICKETS, sources.MISTAKEN)
    )
    both = zip(right.values, mistaken.values, strict=True)
    pairs = [(one, other) for one, other in both if isinstance(one, dict) and isinstance(other, dict)]
    assert len(pairs) == 1600 and all(one["input"] == other["input"] for one, other in pairs)
    assert 0.25 < sum(one["output"] == other["output"] for one, other in pairs) / len(pairs) < 0.35
    assert mistaken.place(0) == "tiny://mistaken-tickets row 1"


def test_files_need_neither_datasets_nor_torch(tmp_path):
    written(tmp_path / "a.jsonl", [{"a": 1}])
    code = f"""
import sys
from conf.schema.data import Part
from trainer.data.read import sources
sources.first(Part(source={str(tmp_path / "a.jsonl")!r}))
print(sorted({{"datasets", "torch", "transformers", "pyarrow", "megatron"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


# The Hub

ASK = """
import json, sys
from conf.schema.data import Part
from trainer.data.read import hub
from trainer.data.read import sources
hub.ROWS = 10
for settings, done in json.load(sys.stdin):
    part = Part(**settings)
    try:
        chunks = list(sources.chunks(part, 0, set(done).__contains__))
        loaded = [(chunk.number, chunk.size, chunk.load()) for chunk in chunks if chunk.number not in done]
        found = [[number, size, rows.values, rows.place(0)] for number, size, rows in loaded]
        print(json.dumps([len(chunks), found, sources.first(part)]))
    except sources.Fault as fault:
        print(json.dumps(str(fault)))
heavy = {"torch", "tensorflow", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A Hub, and ask([settings, chunks that are done]...): `datasets` reads HF_ENDPOINT when it is imported."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "USE_TORCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    def ask(*asked) -> list:
        done = subprocess.run(
            [sys.executable, "-c", ASK], input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with stand_in_hub.serve(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub, ask


def test_a_data_set_on_the_hub(served, tmp_path):
    hub, ask = served
    rows = [{"a": number, "m": [{"r": "u", "c": None}, {"r": "t", "x": number}]} for number in range(35)]
    found = [{"a": row["a"], "m": [{"r": "u"}, {"r": "t", "x": row["a"]}]} for row in rows]
    written(tmp_path / "one/train.parquet", rows)
    written(tmp_path / "one/test.parquet", rows[:3])
    first = hub.publish("datasets/org/set", tmp_path / "one")
    written(tmp_path / "one/train.parquet", rows[:1])
    hub.publish("datasets/org/set", tmp_path / "one")
    settings = {"source": "org/set"}
    everything, pinned, skipped, some, test = ask(
        [settings, []],
        [settings | {"revision": first}, []],
        [settings | {"revision": first}, [0, 1]],
        [settings | {"revision": first}, [0, 2]],
        [settings | {"split": "test", "revision": first}, []],
    )
    chunks = [
        [number, 0, found[number * 10 : number * 10 + 10], f"org/set train row {number * 10 + 1}"]
        for number in range(4)
    ]
    assert everything == [1, [[0, 0, found[:1], "org/set train row 1"]], [found[:1], "org/set train row 1"]]
    assert pinned == [4, chunks, [found[:10], "org/set train row 1"]]
    assert skipped[:2] == [4, chunks[2:]]
    assert some[:2] == [4, [chunks[1], chunks[3]]]
    assert test[1] == [[0, 0, found[:3], "org/set test row 1"]]


def test_a_configuration_of_json_lines_on_the_hub(served, tmp_path):
    hub, ask = served
    written(tmp_path / "set/easy/train.jsonl", [{"q": "1", "a": "2"}])
    written(tmp_path / "set/hard/train.jsonl", [{"q": "3", "a": "4"}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("easy", "hard"))
    (tmp_path / "set/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    hub.publish("datasets/org/set", tmp_path / "set")
    hard, none, wrong = ask(*([{"source": "org/set", "config": config}, []] for config in ("hard", None, "soft")))
    assert hard[1] == [[0, 0, [{"q": "3", "a": "4"}], "org/set train row 1"]]
    assert none.startswith("data.source: org/set train at main: Config name is missing")
    assert wrong.startswith("data.source: org/set (soft) train at main: BuilderConfig 'soft' not found")


def test_an_address_that_is_signed_is_not_shown(served, tmp_path):
    hub, ask = served
    written(tmp_path / "set/train.parquet", [{"a": 1}])
    hub.publish("datasets/org/set", tmp_path / "set")
    hub.inject("/cdn/", status=404, times=99)
    [fault] = ask([{"source": "org/set"}, []])
    assert "Not Found" in fault and "train.parquet" in fault and "secret" not in fault and "sig" not in fault


def test_faults_of_the_hub(served, tmp_path):
    hub, ask = served
    written(tmp_path / "set/train.parquet", [{"a": 1}])
    hub.publish("datasets/org/set", tmp_path / "set")
    (tmp_path / "script").mkdir()
    (tmp_path / "script/script.py").write_text("print()")
    hub.publish("datasets/org/script", tmp_path / "script")
    faults = ask(
        [{"source": "org/none"}, []],
        [{"source": "org/set", "split": "tset"}, []],
        [{"source": "org/set", "revision": "gone"}, []],
        [{"source": "org/script"}, []],
        [{"source": "a/b/c"}, []],
    )
    said = ["org/none", "Bad split: tset", "gone", "Dataset scripts are no longer supported", "a/b/c"]
    for fault, words in zip(faults, said, strict=True):
        assert isinstance(fault, str) and fault.startswith("data.source: ") and words in fault and "\n" not in fault
