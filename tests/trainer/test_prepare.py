"""python -m trainer.prepare as a user starts it: what it writes, what it refuses, and that it always goes on."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from contract import output_marks
from tests.support import data_folders, preloaded
from trainer.rehearsal.tiny_models import make_model

ROOT = Path(__file__).parents[2]
CONF = """
name: some
model: {{source: here}}
data:
  source: {source}
  seq_length: {seq_length}
  template: "{{input}} {{output}}"
train: {{steps: 1, global_batch: 2, precision: fp32}}
optimizer: {{lr: 1e-4}}
checkpoint: {{save_every: 1}}
paths: {{model: {model}, data: data}}
"""
# Chunks of a few kilobytes, so that small files have many.
SMALL = "from trainer.data.read import formats; formats.CHUNK = 4096; "
START = SMALL + "import runpy; runpy.run_module('trainer.prepare', run_name='__main__', alter_sys=True)"
IMPORTS = """
import pyarrow.parquet
from pathlib import Path
from trainer.checks import places
from trainer.data import preparation
from trainer.data.tokens import tokenizer
from trainer.startup import entry
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "model"
    make_model("glm4-moe", folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def fork(model):
    with preloaded.python(f"{SMALL}{IMPORTS}tokenizer.load(Path('{model}'), False)") as run:
        yield run


@pytest.fixture
def place(tmp_path, model, fork):
    class Place:
        folder = tmp_path
        data = tmp_path / "data"

        def start(self, *overrides: str) -> subprocess.Popen:
            """As a user does, with smaller chunks."""
            command = [sys.executable, "-c", START, "conf.yaml", *overrides]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            return subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        def run(self, *overrides: str) -> tuple[int, str]:
            """Run the same in a fork that has the imports, which take longer than small files do."""
            done = fork("trainer.prepare", "conf.yaml", *overrides, cwd=tmp_path, merged=True)
            return done.code, done.output

        def report(self) -> dict:
            return json.loads((self.data / "report.json").read_text())

    (tmp_path / "conf.yaml").write_text(CONF.format(source="rows.jsonl", seq_length=256, model=model))
    return Place()


def rows(count: int, seed: int = 0) -> list[dict]:
    draw = random.Random(seed)
    words = ("the", "parcel", "has", "not", "arrived", "and", "I", "was", "charged", "twice", "please", "send", "it")
    return [
        {
            "input": f"{n}: {' '.join(draw.choices(words, k=draw.randint(1, 25)))}?",
            "output": " ".join(draw.choices(words, k=draw.randint(1, 9))),
        }
        for n in range(count)
    ]


def write(file: Path, found: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in found))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_what_is_written(place):
    source = rows(300)
    write(place.folder / "rows.jsonl", source)
    code, output = place.run("data.packed=true")
    assert code == 0, output
    assert "rows.jsonl: pairs: " in output
    lines = {
        name: [json.loads(line) for line in (place.data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("training", "validation", "test")
    }
    assert sorted(row["input"] for part in lines.values() for row in part) == sorted(row["input"] for row in source)
    assert [row for row in source if row in lines["training"]] == lines["training"], "in the order of the source"
    assert all(len(part) > 3 for part in lines.values())
    manifest = json.loads((place.data / "prepared.json").read_text())
    found = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert found == {name: digest for name, digest in digests(place.data).items() if name != "prepared.json"}
    assert {*found} == {
        *(f"{name}.jsonl{ending}" for name in lines for ending in ("", ".idx.npy", ".idx.info")),
        *("training.idx.parquet", "validation.idx.parquet", "report.json", "template.json"),
    }
    table = pq.read_table(place.data / "training.idx.parquet")
    assert manifest["sequences"]["training"] == len(table)
    assert sum(map(len, table["seq_start_id"].to_pylist())) == len(lines["training"])
    report = place.report()
    assert report["rows"] | {"not_chosen": 0} == report["rows"]
    assert (report["rows"]["read"], report["rows"]["kept"]) == (300, 300)
    assert 0.5 < report["packing"]["training"]["efficiency"] <= 1
    assert sum(report["tokens"]["training"]["histogram"]["counts"]) == len(lines["training"])
    assert not list(place.folder.glob("*preparing*"))


@pytest.mark.timeout(120)
def test_a_chat_template_without_an_end_ends_the_command(place, tmp_path):
    folder = data_folders.make(
        tmp_path / "endless",
        "chatml",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
    )
    conversations = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(3)
    ]
    write(place.folder / "rows.jsonl", conversations)
    process = place.start("data.template=auto", f"paths.model={folder}")
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 2
    assert f"{folder}/chat_template.jinja: the template takes more than 5 s" in output


def test_texts_become_indexed_data_sets(place):
    (place.folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} some text " * 9}) + "\n" for n in range(200))
    )
    code, output = place.run("data.template=auto")
    assert code == 0, output
    names = {file.name for file in place.data.iterdir()}
    assert {f"{name}.{ending}" for name in ("training", "validation", "test") for ending in ("bin", "idx")} < names
    assert json.loads((place.data / "prepared.json").read_text())["kind"] == "text"


def test_compressed_mixed_and_limited(place):
    with gzip.open(place.folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(300))
    (place.folder / "b.csv").write_text(
        "question,answer\n" + "".join(f'"what, {n}?","it is {n}"\n' for n in range(300))
    )
    mixture = "[{source: a.jsonl.gz, weight: 3}, {source: b.csv}]"
    code, output = place.run("data.source=null", f"data.mixture={mixture}", "data.rows=200")
    assert code == 0, output
    found = [json.loads(line) for file in place.data.glob("[tv]*.jsonl") for line in file.read_text().splitlines()]
    assert len(found) == 200
    assert sum(row["output"].startswith("it is") for row in found) == 50
    assert place.report()["rows"]["not_chosen"] == 400
    assert [source["rows"] for source in place.report()["sources"]] == [300, 300]


def test_nothing_is_done_twice_and_what_changed_is_noticed(place):
    write(place.folder / "rows.jsonl", rows(100))
    assert place.run()[0] == 0
    before = {file.name: file.stat().st_mtime_ns for file in place.data.iterdir()}
    assert "is already prepared" in place.run("data.workers=3")[1]
    assert {file.name: file.stat().st_mtime_ns for file in place.data.iterdir()} == before
    for change in (lambda: flip(place.data / "training.idx.parquet"), lambda: flip(place.folder / "rows.jsonl", 20)):
        was = digests(place.data)
        change()
        assert "is already prepared" not in place.run()[1]
        assert len(was) == len(digests(place.data))


def flip(file: Path, at: int = -20) -> None:
    """Another letter, and the file's size and times as they were."""
    status, text = file.stat(), bytearray(file.read_bytes())
    text[at] = ord("x") if text[at] != ord("x") else ord("y")
    file.write_bytes(text)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_fault_leaves_what_was_there(place):
    write(place.folder / "rows.jsonl", rows(100))
    assert place.run()[0] == 0
    was = digests(place.data)
    with (place.folder / "rows.jsonl").open("a") as file:
        file.write('{"input": "a", "outp')
    code, output = place.run()
    assert code == 2
    assert "rows.jsonl:101: " in output
    assert "Traceback" not in output
    assert digests(place.data) == was


BAD_ROWS = {
    b'{"input": "a", "outp': "rows.jsonl:3: not JSON",
    b'{"input": "a"}': "rows.jsonl:3: output: no such column",
    b'{"input": "a", "output": ""}': "rows.jsonl:3: output: empty",
    b'{"input": "a", "output": 12}': "rows.jsonl:3: output: not text: 12",
    b'{"input": "a", "output": "\xff"}': "rows.jsonl:3: not UTF-8",
    b"[1]": "rows.jsonl:3: not an object",
    b'{"input": "a", "output": "\\ud800"}': "rows.jsonl:3: output: half of a surrogate pair",
}


def write_with(place, *lines: bytes) -> None:
    """60 good rows, and these from the third line on."""
    good = [json.dumps(row).encode() for row in rows(60)]
    (place.folder / "rows.jsonl").write_bytes(b"\n".join([good[0], b"", *lines, *good[1:]]))


@pytest.mark.parametrize(("line", "said"), BAD_ROWS.items())
def test_a_bad_row_is_named(place, line, said):
    write_with(place, line)
    code, output = place.run()
    assert code == 2
    assert f"error: {said}" in output
    assert "data.bad_rows=drop" in output


def test_bad_rows_are_counted(place):
    write_with(place, *BAD_ROWS)
    code, output = place.run("data.bad_rows=drop")
    assert code == 0, output
    reasons = place.report()["dropped"].values()
    assert [reason["count"] for reason in reasons] == [1] * len(BAD_ROWS)
    places = sorted(reason["samples"][0]["place"] for reason in reasons)
    assert places == [f"rows.jsonl:{3 + n}" for n in range(len(BAD_ROWS))]
    assert place.report()["rows"]["kept"] == 60


def test_rows_longer_than_a_sequence(place):
    long = {"input": "word " * 400, "output": "yes"}
    write(place.folder / "rows.jsonl", [*rows(60), long])
    assert place.run()[0] == 0
    assert place.report()["dropped"]["longer than a sequence"]["samples"][0]["place"].endswith("rows.jsonl:61")
    code, output = place.run("data.too_long=error")
    assert code == 2
    assert "rows.jsonl:61: " in output
    assert "data.too_long=drop" in output
    assert place.run("data.too_long=truncate")[0] == 0
    assert place.report()["truncated"]["rows"] == 1
    assert place.report()["tokens"]["training"]["max"] <= 256


@pytest.mark.parametrize(
    ("count", "overrides", "said"),
    [
        (0, [], "has no rows"),
        (3, [], "is in validation"),
        (3, ["data.source=nowhere.jsonl"], "nowhere.jsonl"),
        (3, ["data.source=null"], "data.source"),
        (3, ["paths.model=nowhere"], "paths.model"),
        (3, ["data.template=nowhere.jinja"], "nowhere.jinja"),
    ],
)
def test_what_cannot_be_prepared(place, count, overrides, said):
    write(place.folder / "rows.jsonl", rows(count))
    code, output = place.run(*overrides)
    assert code == 2, output
    assert said in output
    assert output.count("\n") < 6
    assert not place.data.exists()


def test_the_report_knows_copies_and_what_is_nearly_one(place):
    base = rows(200)
    near = [{"input": row["input"] + " Ada", "output": row["output"]} for row in base if len(row["input"]) > 100][:20]
    asked = [{"input": row["input"], "output": f"another {n}"} for n, row in enumerate(base[:150])]
    write(place.folder / "rows.jsonl", [*base, *base[:10], *near, *asked])
    assert place.run()[0] == 0
    report = place.report()
    assert report["duplicates"]["exact"] == 10
    assert report["duplicates"]["near"] >= len(near)
    assert report["overlap"]["exact"] > 3
    assert any("have a prompt that is also in training" in line for line in report["warnings"])
    assert place.run("data.duplicates=drop")[0] == 0
    assert place.report()["dropped"]["copy of an earlier row"]["count"] == 10
    assert place.report()["rows"]["kept"] == 370 - 10 + len(near) - 10


def test_the_rows_say_the_same_with_one_process_and_with_four(place):
    write(place.folder / "rows.jsonl", rows(400))
    assert place.run("data.processes=1", "data.packed=true")[0] == 0
    one = digests(place.data)
    for file in place.data.iterdir():
        file.unlink()
    assert place.run("data.processes=4", "data.packed=true")[0] == 0
    assert digests(place.data) == one


@pytest.mark.parametrize("trial", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_killed_at_any_moment_it_goes_on(place, trial):
    """Each trial kills the same preparation four times, the six trials 24 times; it never loses what was done."""
    write(place.folder / "rows.jsonl", rows(6000))
    start = time.monotonic()
    running = place.start("data.packed=true", "data.rows=5500")
    output = running.communicate()[0]
    assert running.returncode == 0, output
    whole, undisturbed = time.monotonic() - start, digests(place.data)
    for file in place.data.iterdir():
        file.unlink()
    place.data.rmdir()
    draw, chunks = random.Random(trial), 0
    for _ in range(4):
        running = place.start("data.packed=true", "data.rows=5500")
        time.sleep(draw.uniform(0.3, 1) * whole)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        left = len(list(place.folder.glob("data-preparing/*.chunk")))
        assert left >= chunks or place.data.exists()
        chunks = left
        if place.data.exists():
            break
    code, output = place.run("data.packed=true", "data.rows=5500")
    assert code == 0, output
    assert digests(place.data) == undisturbed
    assert not list(place.folder.glob("*preparing*"))


@pytest.mark.parametrize("of_this, stays", [(True, False), (False, True)])
def test_what_a_kill_after_the_last_step_left_is_removed(place, of_this, stays):
    """The data have their name already; the work on them lies there still. That of other data is not touched."""
    write(place.folder / "rows.jsonl", rows(60))
    assert place.run()[0] == 0
    left = place.folder / "data-preparing"
    output_marks.begin(left, output_marks.PREPARING)
    (left / "encoded-0-0000000.chunk").write_bytes(b"rows")
    if not of_this:
        (left / "identity.json").write_text("{}")
    code, output = place.run()
    assert code == 0 and "is already prepared" in output
    assert left.exists() == stays


def test_it_is_light():
    """Workers are forks of it: what it imports, each of them has."""
    code = "import sys, trainer.prepare; print({'torch', 'megatron', 'datasets', 'pandas'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "set()\n"


def test_lengths_in_the_report(place):
    write(place.folder / "rows.jsonl", rows(200))
    assert place.run("data.validation=0", "data.test=0")[0] == 0
    ids = pq.read_table(place.data / "training.idx.parquet")["input_ids"].to_pylist()
    lengths = np.array([len(row) for row in ids])
    found = place.report()["tokens"]["training"]
    assert (found["tokens"], found["min"], found["max"]) == (lengths.sum(), lengths.min(), lengths.max())
    edges, counts = found["histogram"]["edges"], found["histogram"]["counts"]
    assert counts == np.histogram(lengths, edges)[0].tolist()
