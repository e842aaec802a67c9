"""The object store, both kinds by one interface: S3 is moto's server in a process of its own, over HTTP."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.faults import Fault
from tasks.store import folder as folders
from tasks.store import open_store
from tests.support import s3_server

ROOT = Path(__file__).parents[3]
MARKERS = ("AKIAMARKER", "secret-marker", "token-marker", "url-marker")


@pytest.fixture
def s3(s3_url, monkeypatch):
    """A bucket for this test alone."""
    _, bucket = s3_server.bucket_of_test(s3_url, monkeypatch)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture(params=["file", "s3"])
def uri(request, tmp_path):
    return request.getfixturevalue("s3") if request.param == "s3" else f"file://{tmp_path}/store"


@pytest.fixture
def store(uri):
    return open_store(uri)


def make(folder: Path, sizes: dict[str, int], seed: int = 0) -> Path:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(f"{seed} {name}").randbytes(size))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """By name, large ones as digests: pytest would spend a minute on showing how they differ."""
    read = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    return {name: data if len(data) < 1000 else hashlib.sha256(data).digest() for name, data in read.items()}


MIXED = {"config.json": 100, "empty": 0, "a b/ü %2B+&=?#.bin": 5000, "deep/er/est/x": 1, "large.bin": 40_000_000}


def test_a_folder_goes_and_comes_back(store, tmp_path):
    source = make(tmp_path / "source", MIXED)
    (source / "no files here").mkdir()
    calls = []
    files = store.put(source, "art/1", lambda *now: calls.append(now))
    assert {name: file.size for name, file in files.items()} == MIXED
    assert calls[-1] == (sum(MIXED.values()), sum(MIXED.values()))
    assert store.keys("art/1") == {name: (file.size, file.tag) for name, file in files.items()}
    assert store.changed("art/1", files) == store.changed("art/1", files, deep=True) == {}
    store.get("art/1", files, tmp_path / "back", lambda *now: calls.append(now))
    assert content(tmp_path / "back") == content(source) and calls[-1][0] == calls[-1][1]
    assert not list((tmp_path / "back").glob(".*"))  # nothing partial is left
    assert store.put(source, "art/1") == files  # nothing is sent again, so no tag changes
    assert store.link("art/1") == store.uri + "/art/1"
    assert store.delete("art/1") == sum(MIXED.values()) and store.keys("") == {} and store.delete("art/1") == 0


def test_put_makes_the_prefix_equal_to_the_folder(store, tmp_path):
    source = make(tmp_path / "source", {"kept": 10, "changed": 10, "gone/x": 10, "becomes a folder": 3})
    before = store.put(source, "art")
    store.put(source, "art2")
    (source / "gone/x").unlink()
    (source / "gone").rmdir()
    (source / "becomes a folder").unlink()
    (source / "changed").unlink()
    make(source, {"changed": 10, "gone": 5, "becomes a folder/y": 3}, seed=1)
    after = store.put(source, "art")
    assert store.keys("art").keys() == {"kept", "changed", "gone", "becomes a folder/y"}
    assert before["changed"].sha256 != after["changed"].sha256
    assert before["kept"].sha256 == after["kept"].sha256
    assert len(store.keys("art2")) == 4  # what merely begins with the same letters is another prefix


def test_links_are_followed(store, tmp_path):
    make(tmp_path / "elsewhere", {"blob": 100, "folder/x": 3})
    source = make(tmp_path / "source", {"plain": 1})
    (source / "linked").symlink_to(tmp_path / "elsewhere/blob")
    (source / "folder").symlink_to(tmp_path / "elsewhere/folder")
    files = store.put(source, "art")
    assert files.keys() == {"plain", "linked", "folder/x"}
    (tmp_path / "elsewhere/blob").unlink()
    assert store.changed("art", files, deep=True) == {}
    with pytest.raises(Fault, match=r"linked.*a link to nothing"):
        store.put(source, "art")
    (source / "linked").unlink()
    (source / "loop").symlink_to(source)
    with pytest.raises(Fault, match="a link to a folder above itself"):
        store.put(source, "art")


def test_whatever_happens_to_an_object_is_noticed(store, tmp_path):
    names = {"same": 9, "gone": 9, "longer": 9, "flipped": 9, "rewritten": 9}
    source = make(tmp_path / "source", names)
    files = store.put(source, "art")
    store.remove("art/gone")
    store.write("art/longer", b"0123456789")
    store.write("art/flipped", bytes([source.joinpath("flipped").read_bytes()[0] ^ 1, *b"12345678"]))
    store.write("art/rewritten", source.joinpath("rewritten").read_bytes())
    wrong = {"gone": "missing", "longer": "size 10, not 9", "flipped": "content differs"}
    assert store.changed("art", files) == store.changed("art", files, deep=True) == wrong
    for name in wrong:
        with pytest.raises(Fault, match=rf"{name}: .*create it again|{name}: its content differs from its record"):
            store.get("art", {name: files[name]}, tmp_path / "back")
    assert not [f for f in (tmp_path / "back").iterdir() if f.name in wrong]
    lie = replace(files["same"], sha256="0" * 64)
    assert store.changed("art", {"same": lie}) == {}  # the tag is as recorded
    assert store.changed("art", {"same": lie}, deep=True) == {"same": "content differs"}


def test_get_keeps_what_is_right_and_mends_what_is_not(store, tmp_path):
    files = store.put(make(tmp_path / "source", {"right": 50, "wrong": 50, "short": 50}), "art")
    back = tmp_path / "back"
    store.get("art", files, back)
    (back / "wrong").write_bytes(b"x" * 50)
    (back / "short").write_bytes(b"x")
    (back / "mine").write_bytes(b"stays")
    inode = (back / "right").stat().st_ino
    store.get("art", files, back)
    assert content(back) == content(tmp_path / "source") | {"mine": b"stays"}
    assert (back / "right").stat().st_ino == inode


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//x", ".", "", "a/", "nul\0"])
def test_names_stay_inside(store, tmp_path, name):
    files = store.put(make(tmp_path / "source", {"a": 1}), "art")
    with pytest.raises(Fault, match="not a name inside"):
        store.get("art", {name: files["a"]}, tmp_path / "back")
    with pytest.raises(Fault, match="not a name inside"):
        store.write(name, b"")


def test_a_link_in_the_folder_leads_nothing_out(store, tmp_path):
    files = store.put(make(tmp_path / "source", {"sub/a": 1}), "art")
    (tmp_path / "outside").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back/sub").symlink_to(tmp_path / "outside")
    with pytest.raises(Fault, match="leads out of"):
        store.get("art", files, tmp_path / "back")
    assert not list((tmp_path / "outside").iterdir())


def test_small_objects(store):
    assert store.read("a/lease") is None and not store.remove("a/lease")
    first = store.create("a/lease", b"mine")
    assert first and store.create("a/lease", b"yours") is None and store.read("a/lease") == (b"mine", first)
    second = store.replace("a/lease", b"still mine", first)
    assert second and store.replace("a/lease", b"late", first) is None
    assert not store.remove("a/lease", first) and store.read("a/lease") == (b"still mine", second)
    assert store.remove("a/lease", second) and store.read("a/lease") is None
    assert store.replace("a/lease", b"late", second) is None
    written = store.write("a/lease", b"")
    assert store.read("a/lease") == (b"", written) and store.keys("a") == {"lease": (0, written)}


def _count_up(uri: str, times: int) -> None:
    store = open_store(uri)
    while times:
        if (now := store.read("counter")) is None:
            times -= store.create("counter", b"1") is not None
        else:
            times -= store.replace("counter", b"%d" % (int(now[0]) + 1), now[1]) is not None


def test_processes_that_compare_and_swap_lose_no_update(store, uri):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_count_up, args=(uri, 10)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0] and store.read("counter")[0] == b"30"


def test_only_one_of_many_creates(store, uri):
    open_store(uri).write("begin", b"")
    with ThreadPoolExecutor(4) as pool:
        tags = list(pool.map(lambda i: open_store(uri).create("lease", b"%d" % i), range(4)))
    assert sum(tag is not None for tag in tags) == 1 and store.read("lease")[0] == b"%d" % next(
        i for i, tag in enumerate(tags) if tag
    )


def _many(store, source: Path, count: int) -> None:
    files = store.put(make(source, {f"{i % 7}/{i}": 1 for i in range(count)}), "art")
    assert len(store.keys("art")) == count and store.changed("art", files) == {}
    assert store.delete("art") == count and store.keys("") == {}


@pytest.mark.slow
def test_more_than_a_thousand_objects(store, tmp_path):
    _many(store, tmp_path / "source", 1001)


def test_many_pages_of_objects(s3, tmp_path):
    store = open_store(s3)
    small = lambda params, **_: params.update(MaxKeys=20)  # noqa: E731
    store.client.meta.events.register("before-parameter-build.s3.ListObjectsV2", small)
    _many(store, tmp_path / "source", 101)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NAMES.filter(lambda n: not n.startswith(".") and "/" not in n), unique=True, max_size=5))
def test_any_name(store, tmp_path, names):
    source = Path(tempfile.mkdtemp(dir=tmp_path))
    for name in names:
        (source / name).write_bytes(name.encode())
    files = store.put(source, "art")
    assert set(files) == set(store.keys("art")) == set(names)
    store.get("art", files, tmp_path / "back")
    assert all((tmp_path / "back" / name).read_bytes() == name.encode() for name in names)


CHILD = """
import json, sys
from pathlib import Path
from tasks.store import File, open_store
way, uri, folder, files = sys.argv[1:]
store = open_store(uri)
store.keys("")
print("begins", flush=True)
if way == "put":
    store.put(Path(folder), "art")
else:
    store.get("art", {n: File(**f) for n, f in json.loads(files).items()}, Path(folder))
"""


def _child(way, uri, folder, files=None):
    known = json.dumps({name: vars(file) for name, file in (files or {}).items()})
    return subprocess.Popen([sys.executable, "-c", CHILD, way, uri, folder, known], cwd=ROOT, stdout=subprocess.PIPE)


def _killed_at_random_points(times, seconds, way, uri, folder, files=None, undo=lambda: None):
    """Number of those that were not done by then. What one goes on with, those before it have left."""
    interrupted = 0
    for _ in range(times):
        with _child(way, uri, folder, files) as child:
            assert child.stdout.readline() == b"begins\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(random.uniform(*seconds))
            interrupted += child.poll() is None
            child.send_signal(signal.SIGKILL)
        if child.returncode == 0:
            undo()
    return interrupted


BIG = {"big-1": 90_000_000, "big-2": 50_000_001} | {f"small/{i}": i * 100 for i in range(60)}


def test_killed_and_begun_again(store, uri, tmp_path):
    source = make(tmp_path / "source", BIG)
    seconds = 0.7 if uri.startswith("s3") else 0.1
    interrupted = _killed_at_random_points(3, (0, seconds), "put", uri, source)
    files = store.put(source, "art")
    assert store.changed("art", files, deep=True) == {}
    interrupted += _killed_at_random_points(3, (0, seconds), "get", uri, tmp_path / "back", files)
    store.get("art", files, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert interrupted


class Proxy:
    """Passes bytes on to the server, and after 20 to 30 MB of all connections cuts the one that sends."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self.target, self.cut, self.random, self.lock = (host, int(port)), 0, random.Random(1), threading.Lock()
        self.left = self._distance()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _distance(self) -> int:
        return self.random.randrange(20_000_000, 30_000_000)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            self.sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                self.threads.append(threading.Thread(target=self._pass_on, args=(source, sink)))
                self.threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not self._cuts(len(data)):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts(self, size: int) -> bool:
        with self.lock:
            self.left -= size
            if self.left > 0:
                return False
            self.cut, self.left = self.cut + 1, self._distance()
            return True

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(10)
        for end in self.sockets:
            end.close()


def test_broken_connections_are_survived(s3, s3_url, tmp_path, monkeypatch):
    source = make(tmp_path / "source", {"large": 40_000_000} | {str(i): 1000 for i in range(10)})
    with contextlib.closing(Proxy(s3_url)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(s3)
        files = store.put(source, "art")
        store.get("art", files, tmp_path / "back")
        store.client.close()
    assert content(tmp_path / "back") == content(source) and proxy.cut > 1


def test_an_upload_is_continued_and_that_of_a_changed_file_aborted(s3, tmp_path):
    store, client = open_store(s3), open_store(s3).client
    source = make(tmp_path / "source", {"same": 40_000_000, "changed": 40_000_000})
    where = dict(Bucket=store.bucket)
    sent = []
    client.meta.events.register("before-parameter-build.s3.UploadPart", lambda params, **_: sent.append(params))
    for name in ("same", "changed", "no longer there"):
        key = f"some/prefix/art/{name}"
        data = (source / "same").read_bytes()[: 16 << 20]
        upload = client.create_multipart_upload(**where, Key=key, Metadata={"sha256": "that of then"})["UploadId"]
        client.upload_part(**where, Key=key, UploadId=upload, PartNumber=1, Body=data)
    store.__dict__["client"] = client
    sent.clear()
    files = store.put(source, "art")
    assert store.uploads("art") == {}
    assert store.changed("art", files, deep=True) == {}
    # what the continued upload was begun with was another digest: noticed, and sent once more as a whole
    assert client.head_object(**where, Key="some/prefix/art/same")["Metadata"]["sha256"] == files["same"].sha256
    assert sorted(p["PartNumber"] for p in sent if p["Key"].endswith("same")) == [1, 2, 2, 3, 3]
    assert sorted(p["PartNumber"] for p in sent if p["Key"].endswith("changed")) == [1, 2, 3]


def test_a_file_that_changes_while_it_is_sent_is_refused(s3, tmp_path):
    store = open_store(s3)
    source = make(tmp_path / "source", {"large": 40_000_000})

    def scribble(**_):
        with (source / "large").open("r+b") as f:
            f.seek(20_000_000)
            f.write(b"late")

    store.client.meta.events.register("before-parameter-build.s3.CreateMultipartUpload", scribble)
    with pytest.raises(Fault, match="large: was written to while"):
        store.put(source, "art")
    assert store.keys("art") == {}


def test_the_credentials_stand_in_no_message(s3, monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG")
    good = open_store(s3)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        dead = f"http://user:url-marker@127.0.0.1:{free.getsockname()[1]}"
    texts = []
    for faults, change in (
        ("no such bucket", {}),
        ("does not answer", {"AWS_ENDPOINT_URL": dead, "AWS_MAX_ATTEMPTS": "1"}),
        ("AWS_ENDPOINT_URL", {"AWS_ENDPOINT_URL": "secret-marker"}),
        ("no credentials", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SESSION_TOKEN": ""}),
        ("no credentials", {"AWS_PROFILE": "nobody"}),
    ):
        with monkeypatch.context() as environment:
            for key, value in change.items():
                environment.setenv(key, value)
            with pytest.raises(Fault, match=faults) as caught:
                open_store("s3://no-such-bucket/x").write("key", b"data")
            assert caught.value.__suppress_context__
            texts.append(str(caught.value))
    for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Whatever"):
        texts.append(_refused_with(code, good))
    for uri in ("s3://AKIAMARKER:secret-marker@bucket/x", "s3://bucket/x?AWSAccessKeyId=AKIAMARKER"):
        with pytest.raises(Fault) as caught:
            open_store(uri)
        texts.append(str(caught.value))
    good.write("key", b"data")
    everything = "\n".join([*texts, caplog.text, repr(good), repr(vars(good))])
    assert not [marker for marker in MARKERS if marker in everything]
    assert all("\n" not in text for text in texts)


def _refused_with(code: str, store) -> str:
    """What the message is when the server answers with this code, and repeats the key in its own message."""
    from botocore.exceptions import ClientError

    def answer(**_):
        raise ClientError({"Error": {"Code": code, "Message": "AKIAMARKER secret-marker token-marker"}}, "PutObject")

    store.client.meta.events.register_first("before-call.s3.PutObject", answer)
    try:
        with pytest.raises(Fault) as caught:
            store.write("key", b"")
        return str(caught.value)
    finally:
        store.client.meta.events.unregister("before-call.s3.PutObject", answer)


def test_a_store_without_conditional_writes_is_found_out(s3):
    def ignored(request, **_):
        for header in ("If-None-Match", "If-Match"):
            if header in request.headers:
                del request.headers[header]

    store = open_store(s3)
    store.client.meta.events.register("before-sign.s3", ignored)
    with pytest.raises(Fault, match="ignores IfNoneMatch"):
        store.create("lease", b"")
    assert store.keys("") == {}


def test_a_lost_answer_does_not_hide_that_we_created_it(s3):
    store = open_store(s3)
    assert store.create("warm", b"")
    lost = []

    def lose_the_first(response_dict, **_):
        if not lost:
            lost.append(response_dict)
            response_dict["status_code"], response_dict["body"] = 500, b""

    store.client.meta.events.register("before-parse.s3.PutObject", lose_the_first)
    assert store.create("lease", b"mine") and lost and store.create("lease", b"mine") is None


def test_two_processes_share_one_folder(s3, tmp_path):
    source = make(tmp_path / "source", {"large": 60_000_000, "small": 5})
    files = open_store(s3).put(source, "art")
    children = [_child("get", s3, tmp_path / "back", files) for _ in range(2)]
    for child in children:
        with child:
            assert child.wait(60) == 0
    assert content(tmp_path / "back") == content(source)


def test_a_full_disk_is_one_line(tmp_path, s3, monkeypatch):
    store = open_store(s3)
    files = store.put(make(tmp_path / "source", {"a": 3}), "art")
    with pytest.raises(Fault, match=r"1\.00 TB are needed .* free some space"):
        store.get("art", {"a": replace(files["a"], size=10**12)}, tmp_path / "back")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Fault, match=r"the disk is full .* free some"):
        open_store(str(tmp_path / "store")).put(tmp_path / "source", "art")


def test_a_folder_that_cannot_be_linked_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    source = make(tmp_path / "source", MIXED)
    store = open_store(str(tmp_path / "store"))
    files = store.put(source, "art")
    assert store.put(source, "art") == files and store.changed("art", files, deep=True) == {}
    assert not os.path.samefile(source / "large.bin", tmp_path / "store/art/large.bin")


def test_a_hard_linked_file_is_hashed_once_after_its_source_is_gone(tmp_path, monkeypatch):
    source = make(tmp_path / "source", {"a": 10, "b": 10})
    store = open_store(str(tmp_path / "a store"))
    files = store.put(source, "art")
    assert store.place("art") == tmp_path / "a store/art"
    assert os.path.samefile(source / "a", tmp_path / "a store/art/a")
    (source / "a").unlink()
    hashed = []
    monkeypatch.setattr(folders, "sha256", lambda path, hash=folders.sha256: hashed.append(path.name) or hash(path))
    assert store.changed("art", files) == store.changed("art", files) == {} and hashed == ["a"]
    (source / "b").write_bytes(b"0123456789")  # in place: the store's copy is the same file
    assert store.changed("art", files) == {"b": "content differs"}


def test_a_link_placed_in_the_store_hands_nothing_out(tmp_path):
    store = open_store(str(tmp_path / "store"))
    files = store.put(make(tmp_path / "source", {"a": 10}), "art")
    (tmp_path / "store/art/a").unlink()
    (tmp_path / "store/art/a").symlink_to(tmp_path / "source/a")
    assert store.keys("art") == {} and store.changed("art", files) == {"a": "missing"}
    with pytest.raises(Fault, match="reserved for the store"):
        store.read(".store/lock")


@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_store_in_the_place_of_a_file_is_not_taken_for_an_empty_one(tmp_path, below):
    (tmp_path / "file").write_bytes(b"")
    store = open_store(f"{tmp_path}/file{below}")
    for look in (lambda: store.keys(""), lambda: store.keys("art"), lambda: store.read("art/record.json")):
        with pytest.raises(Fault, match=rf"^{tmp_path}/file{below}: Not a directory; .* must be a writable folder"):
            look()
    within = open_store(str(tmp_path))  # where an object stands above the name, there is none of that name
    assert within.read("file/x") is None and within.keys("file/x") == {}


def test_a_folder_that_may_not_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Fault, match="must be a writable folder"):
        open_store(str(tmp_path / "file")).write("x", b"")
    with pytest.raises(Fault, match="no such folder"):
        open_store(str(tmp_path)).put(tmp_path / "nothing", "art")


@pytest.mark.parametrize("uri", ["", "gs://bucket", "s3://", "s3:///x", "file://host/x", "s3://b/x?y", "http://[x"])
def test_other_uris_are_refused(uri):
    with pytest.raises(Fault, match="store: "):
        open_store(uri)


def test_uris(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("s3://bucket/a/").uri == "s3://bucket/a" and open_store("s3://bucket").uri == "s3://bucket"
    assert open_store("a b").uri == f"file://{tmp_path}/a%20b" == open_store(f"file://{tmp_path}/a%20b").uri
    assert open_store("s3://bucket").link("x") == "s3://bucket/x" and open_store("s3://bucket").place("x") is None


@pytest.mark.slow
def test_twenty_interruptions(s3, tmp_path):
    """Some 1 GB each way, killed 20 times."""
    source = make(tmp_path / "source", BIG | {f"more/{i}": 200_000_000 for i in range(4)})
    store, back = open_store(s3), tmp_path / "back"
    assert _killed_at_random_points(10, (0, 4), "put", s3, source, undo=lambda: store.delete("art")) >= 5
    files = store.put(source, "art")
    assert store.changed("art", files, deep=True) == {}
    assert _killed_at_random_points(10, (0, 2), "get", s3, back, files, undo=lambda: shutil.rmtree(back)) >= 5
    store.get("art", files, back)
    assert content(back) == content(source)
    store.delete("art")


def test_folders_of_several_hosts_become_one(store, tmp_path):
    """Each host stores its part, and nobody removes another's, not even an unfinished upload."""
    parts = [make(tmp_path / str(host), {f"{host}": 9, "own/small": 3} if host else {"0": 20 << 20}) for host in (0, 1)]
    first = store.put(parts[0], "made", kept=lambda _: True)
    second = store.put(parts[1], "made", kept=lambda _: True)
    assert store.keys("made").keys() == {"0", "1", "own/small"} and store.changed("made", first | second) == {}
    last = make(tmp_path / "last", {"2": 5})
    files = store.put(last, "made", kept={"0"}.__contains__)
    assert store.keys("made").keys() == {"0", "2"} and files.keys() == {"2"}
