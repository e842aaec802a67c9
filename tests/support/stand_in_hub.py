"""A small Hugging Face Hub on a loopback port, for huggingface_hub itself to talk to.

    with stand_in_hub.serve(tmp_path / "hub") as hub:
        commit = hub.publish("models/org/name", folder)         # and again after a change: the branch moves
        hub.inject("model-00001", drop_after=1000)              # the next answer whose path has that breaks off
        ... HF_ENDPOINT=hub.url ...
        assert hub.sent["model-00001-of-00002.safetensors"] == 4096

    python tests/support/stand_in_hub.py STATE models/org/name=FOLDER [datasets/org/data=FOLDER ...] [--port N]

It answers what model_info, dataset_info, list_repo_tree, list_repo_refs, get_paths_info, hf_hub_download and
snapshot_download ask, gated and private repositories included, with the Hub's status codes and headers as of
huggingface_hub 1.33. Weights are LFS files: they are redirected to another host name, where a token must not arrive.
Not covered: Xet, uploads, signatures that run out, the page of a model.
"""

import argparse
import hashlib
import json
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".parquet"}
CHUNK = 2**16


@dataclass(frozen=True)
class File:
    path: Path
    size: int
    blob: str
    sha256: str | None  # of LFS files

    @property
    def etag(self) -> str:
        return self.sha256 or self.blob


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branch -> commit
    commits: dict[str, dict[str, File]] = field(default_factory=dict)

    def at(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Trouble:
    """Trouble for the next `times` requests whose path has `match` in it."""

    match: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # bytes of the body, then the connection is reset
    rate: float | None = None  # bytes a second
    flip: bool = False  # one bit of the body is wrong
    ignore_range: bool = False


@dataclass
class Hub:
    state: Path
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)  # models/org/name, datasets/org/name
    tokens: dict[str, set[str]] = field(default_factory=dict)  # token -> gated and private repositories it may read
    troubles: list[Trouble] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)  # bytes of content by file name
    requests: list[str] = field(default_factory=list)  # "GET /path"
    leaked: list[str] = field(default_factory=list)  # paths where a token arrived that should not have
    lock: Lock = field(default_factory=Lock)

    def publish(self, repo: str, folder: Path, branch: str = "main", **traits: bool) -> str:
        """Commit the present content of the folder; the branch points to the commit. Traits: private, gated."""
        (self.state / "blobs").mkdir(parents=True, exist_ok=True)

        def keep(path: Path) -> tuple[str, File]:
            data = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            sha256 = hashlib.sha256(data).hexdigest() if path.suffix in LFS else None
            kept = Path(shutil.copyfile(path, self.state / "blobs" / blob))
            return path.relative_to(folder).as_posix(), File(kept, len(data), blob, sha256)

        with ThreadPoolExecutor(8) as pool:  # models of benchmarks have many GB
            files = dict(pool.map(keep, sorted(path for path in folder.rglob("*") if path.is_file())))
        listing = json.dumps({name: file.blob for name, file in files.items()})
        commit = hashlib.sha1(f"{repo} {listing}".encode()).hexdigest()
        entry = self.repos.setdefault(repo, Repo())
        for trait, value in traits.items():
            setattr(entry, trait, value)
        entry.commits[commit] = files
        entry.refs[branch] = commit
        return commit

    def inject(self, match: str, **trouble) -> None:
        self.troubles.append(Trouble(match, **trouble))

    def trouble(self, path: str) -> Trouble | None:
        with self.lock:
            for trouble in self.troubles:
                if trouble.match in path and trouble.times > 0:
                    trouble.times -= 1
                    return trouble
        return None


@contextmanager
def serve(state: Path, port: int = 0) -> Iterator[Hub]:
    hub = Hub(state)
    server = _Server(("127.0.0.1", port), _Handler)
    server.hub = hub
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: Hub

    def handle_error(self, request, client_address) -> None:
        """Ignore a client that went away."""


class _Refused(Exception):
    def __init__(self, status: int, code: str | None, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    trouble: Trouble | None

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args) -> None:
        pass

    def do_GET(self) -> None:
        hub, parts = self.server.hub, urlsplit(self.path)
        with hub.lock:
            hub.requests.append(f"{self.command} {self.path}")
        self.trouble = hub.trouble(self.path)
        length = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(length)
        try:
            if self.trouble and self.trouble.status:
                self._answer(self.trouble.status, self.trouble.headers, b"trouble")
            else:
                self._route(parts.path, parse_qs(parts.query))
        except _Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._json({"error": refused.message}, refused.status, headers)

    do_HEAD = do_POST = do_GET

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        repo = r"((?:models|datasets)/[^/]+(?:/[^/]+)?)"
        if match := re.fullmatch(rf"/api/{repo}/revision/([^/]+)", path):
            self._info(match[1], unquote(match[2]), "blobs" in query)
        elif match := re.fullmatch(rf"/api/{repo}/tree/([^/]+)(?:/(.+))?", path):
            self._tree(match[1], unquote(match[2]), unquote(match[3] or ""), query)
        elif match := re.fullmatch(rf"/api/{repo}/paths-info/([^/]+)", path):
            self._paths_info(match[1], unquote(match[2]))
        elif match := re.fullmatch(rf"/api/{repo}/refs", path):
            refs = self._visible(match[1]).refs
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": refs[name]} for name in refs]
            self._json({"branches": branches, "tags": [], "converts": []})
        elif match := re.fullmatch(rf"/api/{repo}", path):
            self._info(match[1], "main", "blobs" in query)
        elif match := re.fullmatch(r"/(datasets/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path):
            self._resolve((match[1] or "models/") + match[2], unquote(match[3]), unquote(match[4]))
        elif match := re.fullmatch(r"/cdn/(\w+)/(.+)", path):
            if self.headers.get("Authorization"):
                self.server.hub.leaked.append(path)
            self._content(self.server.hub.state / "blobs" / match[1], unquote(match[2]), {})
        else:
            raise _Refused(404, None, f"the stand-in has no route {path}")

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _visible(self, name: str) -> Repo:
        """The repository, if the client may know of it."""
        hub, token = self.server.hub, self._token()
        if token and token not in hub.tokens:
            raise _Refused(401, None, "Invalid credentials in Authorization header")
        repo = hub.repos.get(name)
        if repo is None or (repo.private and name not in hub.tokens.get(token or "", ())):
            raise _Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        return repo

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, File]]:
        repo = self._visible(name)
        commit = repo.at(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]

    def _info(self, name: str, revision: str, blobs: bool) -> None:
        commit, files = self._files(name, revision)
        repo, identity = self.server.hub.repos[name], name.partition("/")[2]
        siblings = [{"rfilename": path, **(_sibling(file) if blobs else {})} for path, file in files.items()]
        info = {"_id": commit[:24], "id": identity, "modelId": identity, "sha": commit, "siblings": siblings}
        info |= {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
        info |= {"tags": [], "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z"}
        self._json(info)

    def _tree(self, name: str, revision: str, below: str, query: dict[str, list[str]]) -> None:
        commit, files = self._files(name, revision)
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for path, file in files.items():
            if below and not path.startswith(f"{below}/"):
                continue
            inner = path[len(below) + 1 :] if below else path
            folders = inner.split("/")[:-1]
            for depth in range(1, len(folders) + 1 if recursive else min(2, len(folders) + 1)):
                folder = "/".join(([below] if below else []) + folders[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": commit, "size": 0}
            if recursive or not folders:
                entries[path] = _entry(path, file)
        if below and not entries:
            raise _Refused(404, "EntryNotFound", f"{below} does not exist on {revision!r}")
        self._json(list(entries.values()))

    def _paths_info(self, name: str, revision: str) -> None:
        _, files = self._files(name, revision)
        text = self.body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        asked = [asked] if isinstance(asked, str) else asked
        found = [_entry(path, files[path]) for path in asked if path in files]
        found += [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            for path in asked
            if any(file.startswith(f"{path}/") for file in files)
        ]
        self._json(found)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        hub, token = self.server.hub, self._token()
        commit, files = self._files(name, revision)
        if hub.repos[name].gated and name not in hub.tokens.get(token or "", ()):
            raise _Refused(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
        if path not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        file = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.sha256:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"'}
            port = self.server.server_address[1]
            self._answer(
                302, headers | {"Location": f"http://localhost:{port}/cdn/{file.blob}/{quote(path)}?sig=secret"}
            )
        else:
            self._content(file.path, path, headers)

    def _content(self, kept: Path, name: str, headers: dict[str, str]) -> None:
        trouble, size = self.trouble or Trouble(""), kept.stat().st_size
        start, end, status = 0, size - 1, 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and not trouble.ignore_range:
            start, end, status = int(match[1]), min(int(match[2] or end), end), 206
            if start > end:
                return self._answer(416, {"Content-Range": f"bytes */{size}"})
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{size}"}
        self._head(status, headers | {"Content-Length": str(end + 1 - start)})
        if self.command == "HEAD":
            return None
        began, given = time.monotonic(), 0
        with kept.open("rb") as file:
            file.seek(start)
            while left := end + 1 - start - given:
                if trouble.drop_after is not None:
                    left = min(left, trouble.drop_after - given)
                    if not left:
                        return self._drop()
                chunk = file.read(min(CHUNK if trouble.rate is None else max(1, int(trouble.rate / 50)), left))
                if trouble.flip and not given:
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                self.wfile.write(chunk)
                given += len(chunk)
                with self.server.hub.lock:
                    self.server.hub.sent[name] += len(chunk)
                if trouble.rate is not None:
                    time.sleep(max(0.0, given / trouble.rate - (time.monotonic() - began)))
        return None

    def _drop(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, value, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, {"Content-Type": "application/json"} | (headers or {}), json.dumps(value).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self._head(status, headers | {"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _sibling(file: File) -> dict:
    lfs = {"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}} if file.sha256 else {}
    return {"size": file.size, "blobId": file.blob} | lfs


def _entry(path: str, file: File) -> dict:
    lfs = {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}} if file.sha256 else {}
    return {"type": "file", "path": path, "size": file.size, "oid": file.blob} | lfs


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve folders as repositories of a Hub, until killed.")
    parser.add_argument("state", type=Path, help="a folder for copies of what is served")
    parser.add_argument("repos", nargs="+", metavar="KIND/ORG/NAME=FOLDER", help="as in models/org/name=FOLDER")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    with serve(args.state, args.port) as hub:
        for repo in args.repos:
            name, _, folder = repo.partition("=")
            hub.publish(name, Path(folder))
        print(hub.url, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
