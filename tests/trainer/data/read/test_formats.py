"""trainer/data/read/formats.py and what is behind it: the same rows from every format, cut anywhere; faults of
files."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.faults import Fault
from trainer.data.read import formats
from trainer.data.rows import Bad

ROOT = Path(__file__).parents[4]
COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst", ".lz4")
TRICKY = [
    {"input": 'a "quoted", comma', "output": "line\nline\r\nline\ttab"},
    {"input": "ü 😀 \u2028 \x85 \ufeff", "output": '\\ \\" \\\\'},
    {"input": "]}[{,", "output": '"'},
    {"input": "", "output": "x" * 300},
    {"input": "\x0b\x0c\x01", "output": "'"},
]
ROWS = [{name: f"{text}{number}" for name, text in TRICKY[number % 5].items()} for number in range(60)]


def json_lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def cells(rows, delimiter=",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return file.getvalue().encode()


def parquet(rows, **options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def arrow(rows, new=pa.ipc.new_file, batch=17, **options) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)
    return sink.getvalue().to_pybytes()


WAYS = {
    "a.jsonl": json_lines,
    "ascii.ndjson": lambda rows: "\r\n".join(json.dumps(row) for row in rows).encode(),
    "lines.json": json_lines,
    "array.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False).encode(),
    "within.json": lambda rows: json.dumps({"v": [1, "]"], "s": {"d": []}, "data": rows, "z": [[{}]]}).encode(),
    "within pretty.json": lambda rows: json.dumps({"version": "1", "data": rows}, indent=1).encode(),
    "a.csv": cells,
    "a.tsv": lambda rows: cells(rows, "\t"),
    "one group.parquet": parquet,
    "groups.parquet": lambda rows: parquet(rows, row_group_size=7, compression="zstd"),
    "file.arrow": arrow,
    "packed.feather": lambda rows: arrow(rows, compression="lz4"),
    "stream.arrow": lambda rows: arrow(rows, pa.ipc.new_stream),
    "one batch.arrow": lambda rows: arrow(rows, pa.ipc.new_stream, batch=10**6),
}


def compressed(data: bytes, ending: str) -> bytes:
    known = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if ending in known:
        return known[ending](data)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {".zst": "zstd", ".lz4": "lz4"}[ending]) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(path: Path, size: int = 0) -> tuple[list, list[str]]:
    """Values and places of all rows."""
    values, places = [], []
    for _, load in formats.pieces(path, size):
        rows = load()
        values += rows.values
        places += [rows.place(at).removeprefix(str(path)) for at in range(len(rows.values))]
    return values, places


def fault(path: Path) -> str:
    with pytest.raises(Fault) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def attempt(path: Path, size: int) -> tuple[list, list[str]] | str:
    try:
        return read(path, size)
    except Fault as found:
        return str(found)


@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("name", WAYS)
def test_the_same_rows_from_every_format_cut_anywhere(tmp_path, name, ending):
    path = file(tmp_path, name + ending, compressed(WAYS[name](ROWS), ending))
    whole = read(path)
    assert whole[0] == ROWS
    for size in (1, 100, 1000):
        assert read(path, size) == whole
        positions = [position for position, _ in formats.pieces(path, size)]
        assert positions == sorted(positions) and 0 < positions[-1] <= path.stat().st_size
    assert len(list(formats.pieces(path, 100))) > 10


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
def test_lines_cut_at_every_byte(tmp_path, begin, ending):
    lines = [b'{"a": 1}', b"", b'{"a": "\xc3\xbc"}\r', b" \t", b'{"a": [1, 2]}', b"{", b"", b"", b'{"a": "last"}']
    path = file(tmp_path, "a.jsonl" + ending, compressed(begin + b"\n".join(lines), ending))
    whole = read(path)
    assert whole[1] == [":1", ":3", ":5", ":6", ":9"]
    assert [row for row in whole[0] if not isinstance(row, Bad)] == [{"a": v} for v in (1, "ü", [1, 2], "last")]
    for size in range(1, 80):
        assert read(path, size) == whole


@pytest.mark.parametrize("name", ["a.csv", "a.json", "b.json"])
def test_documents_cut_at_every_byte(tmp_path, name):
    data = {
        "a.csv": b'\xef\xbb\xbfa,b\r\n\r\n1,"x\ny"\n\n"2 ""q""","\n"\n3\n4,"z"\n"5",',
        "a.json": b'\xef\xbb\xbf [\n{"a": "]"},\n\n {"a":"\\"}"}, 7,\n{"a" 1},{"a":[{}]}\n\n]\n ',
        "b.json": b'{\n"x":[[{}]], "y":[],"d"\n:[\n{"a":"\\\\"},\n\n{"a":{"b":[{}]}},null,\n{"a":9},]\n,"z":["{"]}',
    }
    path = file(tmp_path, name, data[name])
    values, places = read(path)
    good = {
        "a.csv": [{"a": "1", "b": "x\ny"}, {"a": '2 "q"', "b": "\n"}, {"a": "4", "b": "z"}, {"a": "5", "b": ""}],
        "a.json": [{"a": "]"}, {"a": '"}'}, {"a": [{}]}],
        "b.json": [{"a": "\\"}, {"a": {"b": [{}]}}, {"a": 9}],
    }
    assert [row for row in values if not isinstance(row, Bad)] == good[name]
    expected = {
        "a.csv": [":3", ":6", ":8", ":9", ":10"],
        "a.json": [":2", ":4", ":4", ":5", ":5"],
        "b.json": [":4", ":6", ":6", ":7"],
    }
    assert places == expected[name]
    for size in range(1, 110):
        assert read(path, size) == (values, places)


@given(
    st.lists(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False) | st.integers()), max_size=20), st.data()
)
def test_whatever_json_can_hold_comes_back(tmp_path_factory, rows, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    form = data.draw(st.sampled_from([True, False]))
    path.write_text("".join(json.dumps(row, ensure_ascii=form) + "\n" for row in rows), errors="strict", newline="")
    assert read(path, data.draw(st.integers(1, 300)))[0] == rows
    path.with_name("any.json").write_text(json.dumps(rows, ensure_ascii=form), newline="")
    assert read(path.with_name("any.json"), data.draw(st.integers(1, 300)))[0] == rows


@given(st.binary(max_size=200), st.integers(1, 50))
def test_no_bytes_are_lost_or_bring_it_down(tmp_path_factory, data, size):
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(b'{"a": 1}\n' + data)
    values, places = read(path, size)
    lines = data.split(b"\n")
    numbers = [number for number, line in enumerate(lines, 2) if line.strip(b" \t\r\n\v\f")]
    assert places == [":1", *(f":{number}" for number in numbers)] and len(values) == len(places)


@given(
    st.sampled_from(["a.csv", "a.json"]),
    st.sampled_from([b"[", b"{", b'{"a":[', b'[{"a":1},', b"a,b\n", b'a,b\n1,"']),
    st.lists(st.sampled_from([*b'{}[],,""\\ \n\r a1\xff\xc3\xa9']), max_size=40).map(bytes),
)
def test_broken_documents_are_read_or_refused_alike_however_they_are_cut(tmp_path_factory, name, begin, rest):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(begin + rest)
    whole = attempt(path, 0)
    for size in (1, 2, 3, 7, 20):
        assert attempt(path, size) == whole
    try:
        document = json.loads(begin + rest)
    except ValueError:
        return
    if name == "a.json" and isinstance(document, list):
        assert [row for row in whole[0] if not isinstance(row, Bad)] == [row for row in document if type(row) is dict]
        assert len(whole[0]) == len(document)


# Bad rows


@pytest.mark.parametrize(
    "line, reason, field, shown",
    [
        (b"{", "not JSON", "", 'Expecting property name enclosed in double quotes at character 1, its end, after "{"'),
        (b'{"a": 1} more', "not JSON", "", 'Extra data at character 9, near "more"'),
        (b'{"a": 1, "b"}', "not JSON", "", "Expecting ':' delimiter at character 12, near \"}\""),
        (b'{"a":' * 5000, "not JSON", "", "nested too deeply"),
        (b'{"a":' * 995 + b"{}" + b"}" * 995, "not JSON", "", "nested too deeply"),
        (
            b'{"a": ' + b"9" * 5000 + b"}",
            "not JSON",
            "",
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
        (b'{"a": "\xff"}', "not UTF-8", "", "at byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8", "", "at byte 7"),
        (b'["a", "b"]', "not an object with columns", "", '["a", "b"]'),
        (b"null", "not an object with columns", "", "null"),
        (b"NaN", "not an object with columns", "", "NaN"),
        (b'{"a": "x \\ud800 y"}', "half of a surrogate pair", "a", r"'x \ud800 y'"),
        (b'{"m": [{"c": "\\udfff"}]}', "half of a surrogate pair", "m[0].c", r"'\udfff'"),
        (b'{"m": {"\\udfff": 1}}', "half of a surrogate pair", "m", r"'\udfff'"),
        (b'["\\ud800"]', "half of a surrogate pair", "[0]", r"'\ud800'"),
        (b"\x00\x00", "not JSON", "", 'Expecting value at character 0, near "\\u0000\\u0000"'),
    ],
)
def test_a_bad_line_is_one_bad_row(tmp_path, line, reason, field, shown):
    good = [{"a": 1}, {"a": 2}]
    for name, data in (
        ("a.jsonl", b'{"a": 1}\n\n%b\n{"a": 2}'),
        ("b.txt.jsonl", b'{"a": 1}\r\n\r\n%b\r\n{"a": 2}\r\n'),
    ):
        values, places = read(file(tmp_path, name, data % line), 3)
        assert (values, places) == ([good[0], Bad(reason, field, shown), good[1]], [":1", ":3", ":4"])
        values[1].shown.encode()


def test_numbers_stay_what_they_are(tmp_path):
    numbers = [2**64, 2**63 - 1, -(2**63) - 1, 10**30, 0.1, -0.0, 1e30]
    path = file(tmp_path, "a.jsonl", json_lines([{"a": number, "b": [{"c": number}]} for number in numbers]))
    found = [(row["a"], row["b"][0]["c"]) for row in read(path)[0]]
    assert [(repr(a), repr(b)) for a, b in found] == [(repr(number), repr(number)) for number in numbers]
    path.write_text('{"a": NaN, "b": Infinity, "c": "x"}')
    assert repr(read(path)[0]) == "[{'a': nan, 'b': inf, 'c': 'x'}]"


def test_bad_rows_of_csv(tmp_path):
    data = b'a,b\n1,2\n1\n1,2,3\n\n"x" y,2\n\xff,2\n3,ok\xc3\xa9\n4,\xc3\n5,6\n'
    values, places = read(file(tmp_path, "a.csv", data))
    assert values == [
        {"a": "1", "b": "2"},
        Bad("wrong number of cells", "", "1 cells for 2 columns"),
        Bad("wrong number of cells", "", "3 cells for 2 columns"),
        Bad("not CSV", "", "',' expected after '\"'"),
        Bad("not UTF-8", "a", "at byte 0"),
        {"a": "3", "b": "oké"},
        Bad("not UTF-8", "b", "at byte 0"),
        {"a": "5", "b": "6"},
    ]
    assert places == [":2", ":3", ":4", ":6", ":7", ":8", ":9", ":10"]


def test_text_is_a_document_per_line(tmp_path):
    path = file(tmp_path, "a.txt.xz", lzma.compress("\n one \r\n\ntwo\x85\u2028\n".encode() + b"\xfe\nlast"))
    assert read(path, 4) == (
        [{"text": " one "}, {"text": "two\x85\u2028"}, Bad("not UTF-8", "text", "at byte 0"), {"text": "last"}],
        [":2", ":4", ":5", ":6"],
    )


def test_tables_give_what_python_has(tmp_path):
    rows = [
        {"a": None, "b": [{"x": 1, "f": {"g": None, "h": 2}}, {"y": "t"}], "c": {"d": None, "e": 1}, "n": b"\xff"},
        {"a": 1, "b": [], "c": None, "n": None},
    ]
    expected = [{**rows[0], "b": [{"x": 1, "f": {"h": 2}}, {"y": "t"}]}, rows[1]]
    assert read(file(tmp_path, "a.parquet", parquet(rows))) == (expected, [" row 1", " row 2"])
    assert read(file(tmp_path, "a.arrow", arrow(rows)))[0] == expected


def test_text_in_tables_that_is_none(tmp_path):
    """Arrow checks neither its own text nor its times."""
    text = pa.array([b"a", b"a\xff", b"c"], pa.binary()).cast(pa.string(), safe=False)
    far = pa.array([0, 0, 2**62], pa.timestamp("s"))
    table = pa.table({"a": text, "t": far})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    values, places = read(file(tmp_path, "a.arrow", sink.getvalue().to_pybytes()))
    assert values[0]["a"] == "a" and places == [" row 1", " row 2", " row 3"]
    assert values[1] == Bad("not UTF-8", "a", "at byte 1")
    assert isinstance(values[2], Bad) and (values[2].reason, values[2].field) == ("no such value in Python", "t")


def test_dictionaries_and_maps_of_arrow(tmp_path):
    rows = [{"a": f"v{number % 3}", "m": {"k": number}} for number in range(9)]
    table = pa.table(
        {
            "a": pa.array([row["a"] for row in rows]).dictionary_encode(),
            "m": pa.array([list(row["m"].items()) for row in rows], pa.map_(pa.string(), pa.int64())),
        }
    )
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        sink = pa.BufferOutputStream()
        with new(sink, table.schema) as writer:
            writer.write_table(table, 4)
        path = file(tmp_path, "a.arrow", sink.getvalue().to_pybytes())
        assert read(path)[0] == rows == read(path, 1)[0]


# .json: lines or a document


@pytest.mark.parametrize(
    "data, rows",
    [
        (b"", []),
        (b" \n\n", []),
        (b"[]", []),
        (b'{"a": 1}', [{"a": 1}]),
        (b'\n {"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (
            b'{"messages": [{"role": "user"}], "id": 1}\n{"messages": []}',
            [{"messages": [{"role": "user"}], "id": 1}, {"messages": []}],
        ),
        (b'{"data": [{"a": 1}, {"a": 2}]}', [{"a": 1}, {"a": 2}]),
        (b'{"data": [{"a": 1}], "other": [1]}\n\n', [{"a": 1}]),
        (b'{"x": [{}], "y": [{}]}', [{"x": [{}], "y": [{}]}]),
        (b'{\n"x": [{"a": [{"b": 1}]}]}', [{"a": [{"b": 1}]}]),
        (b'[{"a": 1},]', [{"a": 1}]),
        (b"[\n[1],\n2]", [Bad("not an object with columns", "", "[1]"), Bad("not an object with columns", "", "2")]),
    ],
)
def test_lines_or_a_document(tmp_path, data, rows):
    assert read(file(tmp_path, "a.json", data))[0] == rows


def test_a_broken_first_line_is_a_bad_row_and_no_document(tmp_path):
    values, _ = read(file(tmp_path, "a.json", b'{"a": "x\n{"a": 2}\n'))
    assert isinstance(values[0], Bad) and values[1:] == [{"a": 2}]


@pytest.mark.parametrize(
    "data, said",
    [
        (b'[{"a": 1},\n{"a": 2', ": ends within the row at line 2: brackets or a quote are never closed"),
        (b'[{"a": 1},\n{"a": "2}]', ": ends within the row at line 2: brackets or a quote are never closed"),
        (b'[{"a": 1}]\n{"a": 2}', ":2: more after the end of the JSON document"),
        (b"[1]]", ":1: more after the end of the JSON document"),
        (b'{\n"a": [{}], "b": [{}]}', ": several lists of objects in one object; rows must be in one list"),
        (b'{\n"a": "x",\n"b": [1]}', ": no list of objects in it; rows are objects in an array, or one per line"),
        (b'{\n"a": [{}]', ": ends within line 2: brackets or a quote are never closed"),
    ],
)
def test_documents_that_are_none(tmp_path, data, said):
    assert fault(file(tmp_path, "a.json", data)) == said


# Files that cannot be read


@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.csv", "one group.parquet", "file.arrow"])
@pytest.mark.parametrize("ending", COMPRESSIONS[1:])
def test_a_compressed_file_that_breaks_off(tmp_path, name, ending):
    data = compressed(WAYS[name]([{"a": random.Random(n).randbytes(50).hex()} for n in range(999)]), ending)
    for cut in (1, len(data) // 2, len(data) - 3):
        fault(file(tmp_path, name + ending, data[:cut]))
    fault(file(tmp_path, name + ending, b"no such format, this is text that goes on and on"))


@pytest.mark.parametrize("name", ["groups.parquet", "file.arrow", "stream.arrow", "packed.feather"])
def test_a_table_that_breaks_off(tmp_path, name):
    data = WAYS[name](ROWS)
    for cut in (0, 3, 9, 100, len(data) // 2, len(data) - 12 if name == "stream.arrow" else len(data) - 1):
        fault(file(tmp_path, name, data[:cut]))
    fault(file(tmp_path, name, b"text, and not a table at all, however long it may be"))


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "is gzip; its name has to end in .gz"),
        ("a.csv", b"PK\x03\x04", "is a zip archive"),
        ("a.json", "[]".encode("utf-16"), "is UTF-16; it has to be UTF-8"),
        ("a.txt", b"PAR1", "is Parquet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        ("a.csv", b"a,b,a\n", 'header: column "a" occurs twice'),
        ("a.csv", b"a;b\n1;2\n", 'header: "a;b": cells separated by ";", not by ","'),
        ("a.csv", b"\xffa,b\n", "header: not UTF-8"),
        ("a.csv", b'a,b\n1,2\n3,"4\n5,6\n', ":3: a quote in this row is never closed"),
        ("a.csv", b'"a,b\n', "header: unexpected end of data"),
    ],
)
def test_files_that_are_not_what_they_seem(tmp_path, name, data, said):
    assert said in fault(file(tmp_path, name, data))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_no_permission(tmp_path):
    path = file(tmp_path, "a.jsonl", b"{}")
    path.chmod(0)
    assert fault(path) == ": Permission denied"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_no_file_any_more(tmp_path, name):
    assert fault(tmp_path / name) == ": No such file or directory"


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.read.lines.LONGEST", 1 << 20)
    monkeypatch.setattr("trainer.data.read.json_array.LONGEST", 1 << 20)
    monkeypatch.setattr("trainer.data.read.cells.LONGEST", 1 << 20)
    long = b"x" * (6 << 20)
    assert "a line of more than 1 MiB, which begins with" in fault(file(tmp_path, "a.jsonl", long))
    assert "a line of more than 1 MiB" in fault(file(tmp_path, "a.txt.gz", gzip.compress(long)))
    assert ":1: a row of more than 1 MiB; is a quote missing?" in fault(file(tmp_path, "a.json", b'["' + long))
    assert ":2: a quote in this row" in fault(file(tmp_path, "a.csv", b'a,b\n1,"' + b"x\n" * (3 << 20)))


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
from trainer.data.read import formats
from trainer.data.read import tables
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, rows = peak(), 0
for _, load in formats.pieces(Path(sys.argv[1])):
    rows += len(load().values)
print(rows, (peak() - before) // 1024)
"""


def measured(path: Path) -> tuple[int, int]:
    """Rows, and MiB that reading them took at most."""
    done = subprocess.run([sys.executable, "-c", MEASURE, path], cwd=ROOT, capture_output=True, text=True, check=True)
    rows, memory = map(int, done.stdout.split())
    return rows, memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["array.json", "one group.parquet", "one batch.arrow", "a.csv.gz", "shared.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    """200 MB: a single array, row group or batch, or a value that all rows share and that lies in the file once."""
    draw = random.Random(0)
    words = [draw.randbytes(500).hex() for _ in range(100)]
    rows = [{"input": f"{number} {words[number % 100]}", "output": f"{number}"} for number in range(200_000)]
    if name == "shared.parquet":
        rows = [{"input": "x" * 20_000, "output": f"{number}"} for number in range(10_000)]
    way = WAYS.get(name.removesuffix(".gz"), parquet)
    path = file(tmp_path, name, gzip.compress(way(rows), 1) if name.endswith(".gz") else way(rows))
    found, memory = measured(path)
    assert found == len(rows)
    assert memory < 150, f"{memory} MiB"
