"""tasks/sources/row_sources.py: what a source is known by, and how it comes to this
host."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from boto3.s3.transfer import TransferConfig

from conf.schema.data import Part
from contract.faults import Fault
from tasks.sources import hub, row_sources
from tasks.sources.hub import api
from tests.support import s3_server, stand_in_hub

KEY = "data.source"
LINE = '{"input": "a", "output": "b"}\n'


@pytest.fixture
def memory(tmp_path) -> Path:
    return tmp_path / "runs/cache/digests.json"


@pytest.fixture
def identity(memory):
    """Of a source that is named by its text."""
    return lambda source, **columns: row_sources.identity(Part(source=str(source), **columns), KEY, memory)


def written(path: Path, text: str = LINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(source: object, identity) -> str:
    with pytest.raises(Fault) as caught:
        identity(source)
    text = str(caught.value)
    assert text.startswith(f"{KEY}: ") and "\n" not in text and len(text) < 400
    return text


# Files


def test_a_file_is_known_by_its_content_and_not_by_its_place(identity, tmp_path):
    here = written(tmp_path / "here/x.jsonl")
    found = identity(here)
    assert [*found] == ["content"]
    assert identity(here.parent) == identity(tmp_path / "here/*.jsonl") == found
    moved = here.rename(tmp_path / "y.jsonl")
    assert identity(moved) == found
    assert identity(written(tmp_path / "z.jsonl", LINE + " ")) != found
    assert identity(written(tmp_path / "z.json")) != found  # is read in another way


def test_a_path_may_be_relative_or_begin_with_a_tilde(identity, tmp_path, monkeypatch):
    file = written(tmp_path / "x.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert identity("x.jsonl") == identity("./x.jsonl") == identity("~/x.jsonl") == identity(file)
    part = row_sources.local(Part(source="~/x.jsonl", weight=2), identity("x.jsonl"), KEY, tmp_path / "work")
    assert part == Part(source=str(file), weight=2)


def test_a_folder_is_its_files_of_rows(identity, tmp_path):
    written(tmp_path / "data/b/one.jsonl")
    written(tmp_path / "data/two.csv.GZ", "no gzip, but nobody reads it here")
    before = identity(tmp_path / "data")
    for name in ("README.md", "LICENSE.txt", ".hidden.jsonl", ".git/x.json", "dataset_info.json", "one.jsonl.idx.npy"):
        written(tmp_path / "data" / name)
    assert identity(tmp_path / "data") == before
    written(tmp_path / "data/c.parquet")
    assert identity(tmp_path / "data") != before
    texts = written(tmp_path / "texts/a.txt").parent  # and where there is nothing else, they are rows
    assert identity(texts) == {"content": identity(texts / "a.txt")["content"]}


@pytest.mark.parametrize("named", ["a", "a.bin", "a.idx", "", "a.*"])
def test_tokens_in_bin_and_idx_are_known_by_both_files(identity, tmp_path, named):
    pair = [written(tmp_path / f"corpus/a{ending}", ending) for ending in (".bin", ".idx")]
    for other in ("README.md", "pytorch_model.bin", "a/cache/GPTDataset_indices/1-train-description.txt"):
        written(tmp_path / "corpus" / other)
    source = f"{tmp_path}/corpus/{named}"
    found = identity(source)
    assert row_sources.files(source, KEY) == pair
    moved = [file.rename(tmp_path / f"b{file.suffix}") for file in pair]
    assert identity(tmp_path / "b") == found
    written(moved[0], "another")
    assert identity(tmp_path / "b") != found
    moved[1].unlink()
    assert "b.bin: cannot be used without b.idx" in refused(tmp_path / "b.bin", identity)


def test_the_order_of_files_counts(identity, tmp_path):
    for folder, first, second in (("one", LINE, "{}\n"), ("two", "{}\n", LINE)):
        written(tmp_path / folder / "a.jsonl", first)
        written(tmp_path / folder / "b.jsonl", second)
    assert identity(tmp_path / "one") != identity(tmp_path / "two")


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("absent.jsonl", "no such file"),
        ("absent/folder/of/files", "no such file"),
        ("absent*.jsonl", "matches no file"),
        ("empty", "no file in this folder ends in one of .jsonl, .ndjson"),
        ("model.safetensors", "ends in none of .jsonl, .ndjson"),
        ("dangling.jsonl", "a link to nowhere, which does not exist"),
    ],
)
def test_sources_that_are_none(identity, tmp_path, name, complaint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    assert complaint in refused(tmp_path / name, identity)


@pytest.mark.parametrize(
    "source, complaint",
    [
        (
            "tiny://letters",
            "no such data; there is tiny://tickets, tiny://mistaken-tickets, tiny://ranked-tickets and tiny://texts",
        ),
        ("gs://bucket/rows", "not a source of data"),
        ("https://host/rows.jsonl", "not a source of data"),
        ("rows.jsonl.gz", "no such file"),
        ("s3://", "has no bucket"),
        ("s3://key:secret@bucket/x", "leave them to the environment"),
    ],
)
def test_what_is_no_source_is_said_before_anyone_is_asked(identity, source, complaint):
    text = refused(source, identity)
    assert complaint in text and "secret" not in text


def test_tickets_are_known_by_their_name(identity, tmp_path):
    found = identity("tiny://tickets")
    assert found == {"source": "tiny://tickets"}
    part = Part(source="tiny://tickets")
    assert row_sources.local(part, found, KEY, tmp_path) == part


def test_a_file_that_may_not_be_read_is_named(identity, tmp_path, monkeypatch):
    file = written(tmp_path / "x.jsonl")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(row_sources.checksums, "of_file", denied)
    assert refused(file, identity) == f"data.source: {file}: Permission denied"


# Digests that are remembered


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that were read, as they are read."""
    names: list[str] = []
    digest = row_sources.checksums.of_file
    monkeypatch.setattr(row_sources, "LARGE", 1)
    monkeypatch.setattr(row_sources, "SETTLED", 0.05)
    monkeypatch.setattr(row_sources.checksums, "of_file", lambda file: (names.append(file.name), digest(file))[1])
    return names


def test_what_has_not_changed_is_read_once(identity, hashed, tmp_path):
    file = written(tmp_path / "data/x.jsonl")
    time.sleep(0.1)
    assert identity(file) == identity(file) == identity(file.parent)
    assert hashed == ["x.jsonl"]


def test_one_byte_is_noticed_though_size_and_time_are_as_before(identity, hashed, tmp_path):
    file = written(tmp_path / "x.jsonl")
    time.sleep(0.1)
    before, status = identity(file), file.stat()
    file.write_text(LINE.replace("a", "c"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    time.sleep(0.1)
    assert identity(file) != before
    other = written(tmp_path / "other.jsonl", LINE.replace("a", "d"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)  # another inode
    assert identity(file) not in (before, identity(written(tmp_path / "c.jsonl", LINE.replace("a", "c"))))


def test_a_file_that_was_just_written_is_not_remembered(identity, hashed, memory, tmp_path):
    """Within the grain of the clock a second write could leave all times as they are."""
    file = written(tmp_path / "x.jsonl")
    for _ in range(2):
        os.utime(file)
        identity(file)
    assert hashed == ["x.jsonl"] * 2 and not memory.exists()


def test_small_files_and_those_that_are_gone_take_no_room(identity, hashed, memory, tmp_path, monkeypatch):
    small, gone, there = (written(tmp_path / f"{name}.jsonl", LINE * 9) for name in ("small", "gone", "there"))
    time.sleep(0.1)
    identity(gone)
    gone.unlink()
    identity(there)
    monkeypatch.setattr(row_sources, "LARGE", 1 << 20)
    identity(small)
    assert [*json.loads(memory.read_text())] == [str(there)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": {}}', "\0", '{"x": null}'])
def test_a_damaged_memory_is_none(identity, hashed, memory, tmp_path, text):
    written(memory, text)
    file = written(tmp_path / "x.jsonl")
    time.sleep(0.1)
    assert identity(file) == identity(file)
    assert hashed == ["x.jsonl"]


def test_a_memory_that_cannot_be_written_is_no_fault(identity, hashed, memory, tmp_path):
    written(memory.parent.parent, "a file where the folder should be")
    file = written(tmp_path / "x.jsonl")
    time.sleep(0.1)
    assert identity(file) == identity(file)


def test_a_file_that_grows_while_it_is_read_is_refused(identity, hashed, tmp_path, monkeypatch):
    file = written(tmp_path / "x.jsonl")
    digest = row_sources.checksums.of_file

    def grow(path: Path) -> str:
        found = digest(path)
        path.write_text(LINE * 2)
        return found

    monkeypatch.setattr(row_sources.checksums, "of_file", grow)
    assert "is being written to; start again" in refused(file, identity)


# The Hub


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A Hub on a loopback port, and no token of whoever runs the tests."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "agents").write_text('{"harnesses": {}}')
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"))
    monkeypatch.setattr(api, "WAITS", (0.01,) * 6)
    written(tmp_path / "set/train.jsonl")
    with stand_in_hub.serve(tmp_path / "hub") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def test_a_data_set_is_known_by_its_commit(dataset, identity, tmp_path):
    commit = dataset.publish("datasets/org/data", tmp_path / "set")
    found = identity("org/data", config="en", split="test")
    assert found == {"source": "org/data", "config": "en", "split": "test", "commit": commit}
    assert identity("org/data", config="en", split="test", revision=commit) == found
    assert row_sources.local(Part(source="org/data"), found, KEY, tmp_path) == Part(source="org/data", revision=commit)
    written(tmp_path / "set/train.jsonl", LINE * 2)
    moved = dataset.publish("datasets/org/data", tmp_path / "set")
    assert identity("org/data")["commit"] == moved != commit
    assert identity("org/data", revision=commit)["commit"] == commit


def test_what_the_hub_refuses(dataset, identity, tmp_path):
    dataset.publish("datasets/org/private", tmp_path / "set", private=True)
    for source in ("org/absent", "org/private"):
        assert f"{source}@main: the Hub answers 401; check the name" in refused(source, identity)
    assert "no such file, and no data set's name on the Hub" in refused("not a name", identity)


def test_a_hub_that_is_away(dataset, identity, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refused("org/data", identity).startswith("data.source: org/data: http://127.0.0.1:9 cannot be reached")


# S3


@pytest.fixture
def bucket(s3_url, monkeypatch):
    client, name = s3_server.bucket_of_test(s3_url, monkeypatch, "rows")

    def put(key: str, body: str | bytes = LINE) -> str:
        return client.put_object(Bucket=name, Key=key, Body=body)["ETag"].strip('"')

    yield SimpleNamespace(client=client, name=name, uri=f"s3://{name}", put=put)
    client.close()


def test_objects_are_known_by_their_etags(bucket, identity, tmp_path):
    first, second = bucket.put("some/set/a.jsonl"), bucket.put("some/set/more/b.csv.gz", "xy")
    for other in ("set/README.md", "set/.hidden.jsonl", "set/_SUCCESS", "set/", "set-two/c.jsonl", "set.jsonl"):
        bucket.put(f"some/{other}")
    found = {"objects": [["a.jsonl", len(LINE), first], ["more/b.csv.gz", 2, second]]}
    assert identity(f"{bucket.uri}/some/set") == identity(f"{bucket.uri}/some/set/") == found
    assert identity(f"{bucket.uri}/some/set/a.jsonl") == {"objects": found["objects"][:1]}
    bucket.put("some/set/a.jsonl", LINE.replace("a", "c"))  # as large as before
    assert identity(f"{bucket.uri}/some/set") != found


def test_objects_are_fetched_as_they_were_listed(bucket, identity, tmp_path):
    bucket.put("set/a.jsonl")
    bucket.put("set/more/b.jsonl", LINE * 2)
    part, work = Part(source=f"{bucket.uri}/set", shape="pairs"), tmp_path / "work"
    found = identity(part.source)
    told: list[tuple[int, int]] = []
    local = row_sources.local(part, found, KEY, work, lambda *progress: told.append(progress))
    assert local == Part(source=str(work), shape="pairs")
    assert {str(p.relative_to(work)): p.read_text() for p in work.rglob("*.jsonl")} == {
        "a.jsonl": LINE,
        "more/b.jsonl": LINE * 2,
    }
    assert told[-1] == (3 * len(LINE), 3 * len(LINE))
    assert "content" in identity(work)
    bucket.put("set/a.jsonl", LINE * 3)
    with pytest.raises(Fault, match=r"^data.source: s3://.*/set: its objects have changed since the run began"):
        row_sources.local(part, found, KEY, work)


def test_one_object_is_fetched_alone(bucket, identity, tmp_path):
    bucket.put("a.jsonl")
    bucket.put("b.jsonl")
    part = Part(source=f"{bucket.uri}/a.jsonl")
    row_sources.local(part, identity(part.source), KEY, tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("named", ["a", "a.idx", "a.bin", ""])
def test_tokens_in_bin_and_idx_are_fetched_together(bucket, identity, tmp_path, named):
    for name in ("a.bin", "a.idx", "notes.md", "a/cache/GPTDataset_indices/1-train-description.txt"):
        bucket.put(f"corpus/{name}", name)
    part = Part(source=f"{bucket.uri}/corpus/{named}")
    found = identity(part.source)
    assert [name for name, _, _ in found["objects"]] == ["a.bin", "a.idx"]
    local = row_sources.local(part, found, KEY, tmp_path / "work")
    assert [file.name for file in row_sources.files(str(local.source), KEY)] == ["a.bin", "a.idx"]
    bucket.client.delete_object(Bucket=bucket.name, Key="corpus/a.bin")
    assert "a.idx: cannot be used without a.bin" in refused(f"{bucket.uri}/corpus/a.idx", identity)


def test_a_fetch_goes_on_where_it_was(bucket, identity, tmp_path, monkeypatch):
    """What came before is kept, in an object of several parts too; what is damaged comes again."""
    body = os.urandom(6 << 20)
    config = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    for name in ("whole", "half", "damaged"):
        file = tmp_path / f"{name}.parquet"
        file.write_bytes(body + name.encode())
        bucket.client.upload_file(str(file), bucket.name, f"set/{file.name}", Config=config)
    part, work = Part(source=f"{bucket.uri}/set"), tmp_path / "work"
    found = identity(part.source)
    tags = {name: tag for name, _, tag in found["objects"]}
    partials = work / hub.PARTIAL
    partials.mkdir(parents=True)
    (work / "whole.parquet").write_bytes(body + b"whole")
    (partials / hub.partial_name("half.parquet", f"etag:{tags['half.parquet']}")).write_bytes(body[: 4 << 20])
    (partials / hub.partial_name("damaged.parquet", f"etag:{tags['damaged.parquet']}")).write_bytes(b"x" * 1000)
    sent: list[int] = []
    count = hub.Meter.add

    def add(meter: hub.Meter, size: int, **how: bool) -> None:
        sent.append(size if how.get("sent") else 0)
        count(meter, size, **how)

    monkeypatch.setattr(hub.Meter, "add", add)
    row_sources.local(part, found, KEY, work)
    assert all((work / f"{name}.parquet").read_bytes() == body + name.encode() for name in ("whole", "half", "damaged"))
    assert sum(sent) == (2 << 20) + len("half") + 2 * (len(body) + len("damaged")) - 1000
    assert not (work / hub.PARTIAL).exists()


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("/absent", "contains no objects; check the bucket and the prefix, which is not a pattern"),
        ("/set/*.jsonl", "contains no objects"),
        ("/other", "none of its 2 objects, such as README.md, is a file of rows; their names end in .jsonl"),
        ("/half", "a.bin: cannot be used without a.idx, which is not in the same folder"),
        ("/half/a", "a.bin: cannot be used without a.idx"),
        ("/bad", r"'a\\b.jsonl' is not a name of a file inside a folder"),
    ],
)
def test_what_s3_does_not_have(bucket, identity, source, complaint):
    for key in ("set/a.jsonl", "other/README.md", "other/x.bin", "half/a.bin", "bad/a\\b.jsonl"):
        bucket.put(key)
    assert complaint in refused(bucket.uri + source, identity)


def test_a_bucket_that_is_none(bucket, identity):
    assert "no such bucket" in refused("s3://rows-that-are-none/set", identity)


def test_a_misspelled_file_is_guessed(identity, tmp_path):
    (tmp_path / "tickets.jsonl").touch()
    assert refused(tmp_path / "tikets.jsonl", identity).endswith(f"did you mean {tmp_path}/tickets.jsonl?")
