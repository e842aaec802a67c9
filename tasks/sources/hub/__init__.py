"""Released models: from the Hub, from a folder or from S3, at a pinned state, whole and verified.

    resolved = resolve("zai-org/GLM-4.7", "main")       one question; nothing is fetched
    result = fetch(resolved, Path("model"), unsafe_weights=False, trust_remote_code=False, progress=print)

A source that is an existing folder is that folder; s3://bucket/prefix is read through tasks.store; anything else of the
form org/name is a model of the Hub. tiny://KIND is made by trainer.tiny, which is not this file's affair: kind() names
it and the caller makes it. Data sets are not covered, but for fetch_objects(), which brings any objects of S3.

fetch() may be killed and called again: whole files are hashed and kept, a half one in folder/.partial is continued.
Large files of a folder are linked where that is possible: replace them in the source, do not write into them.
"""

# pyright: reportArgumentType=false

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock

from contract import checksums, regular_files
from contract.amounts import unlike
from contract.faults import Fault
from tasks.sources.hub import api, file_choice, s3_source
from tasks.sources.hub.digests import holds

PARTIAL = ".partial"
PARALLEL = 8  # files at a time, as snapshot_download has it
HTTP_LIMIT = 50 * 10**9  # bytes; the Hub serves larger files by Xet alone
EVERY = 0.5  # seconds between two calls of progress
LINK_FROM = 2**20  # bytes; smaller files are copied: people edit a config.json in place, weights they write anew
SPARE = 64 * 2**20  # bytes that stay free on the disk

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Resolved:
    kind: str  # hub, folder, s3 or tiny
    source: str
    commit: str  # equal commits are equal files
    files: dict[str, int]  # sizes by name
    digests: dict[str, str] = field(default_factory=dict)  # sha256:..., git:... (a blob's sha1) or etag:...


def kind(source: str) -> str:
    """Kind of a source: hub, folder, s3 or tiny. Raises a Fault for a text that looks like a path and is none."""
    scheme, separator, _ = source.partition("://")
    if not source or (separator and scheme not in ("s3", "tiny")):
        raise Fault(
            f"model.source: {source}: not a source of models; it is org/name on the Hub, a folder, s3://... or tiny://..."
        )
    if separator:
        return scheme
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.exists():
        raise Fault(f"model.source: {source}: a file; a model is a folder with its config.json and weights")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise Fault(f"model.source: {source}: no such folder{regular_files.or_meant(path)}")
    return "hub"


def resolve(source: str, revision: str = "main", only: Collection[str] = ()) -> Resolved:
    """Pin the present content of the source, or of the files of these names in it.

    The revision matters for the Hub alone.
    """
    found = _resolve(source, revision, only)
    if not only:
        return found
    kept = {name: size for name, size in found.files.items() if name in only}
    return replace(found, files=kept, digests={name: found.digests[name] for name in kept})


def _resolve(source: str, revision: str, only: Collection[str]) -> Resolved:
    what = kind(source)
    assert what != "tiny", "a tiny model is made, not fetched"
    if what == "folder":
        return _resolve_folder(source, only)
    if what == "s3":
        objects = _open_store(source).keys("")
        if not objects:
            raise Fault(f"{source}: nothing lies there; check the bucket and the prefix")
        sizes = {name: size for name, (size, _) in objects.items()}
        return Resolved(
            "s3", source, checksums.of_json(objects), sizes, {name: f"etag:{tag}" for name, (_, tag) in objects.items()}
        )
    try:
        commit, sizes, digests = api.describe(source, revision or "main")
    except api.NotThere as fault:
        raise Fault(f"{fault}{regular_files.or_meant(Path(source))}") from None
    if bad := [name for name in sizes if file_choice.unsafe_name(name)]:
        raise Fault(f"{source}: {bad[0]!r} is no name of a file inside a folder; do not use this repository")
    return Resolved("hub", source, commit, sizes, digests)


def fetch(
    resolved: Resolved, folder: Path, unsafe_weights: bool, trust_remote_code: bool, progress: Progress | None = None
) -> dict:
    """Bring the files that a model needs into the folder. Returns them, and the files left out with the reasons."""
    started = time.monotonic()
    chosen, left_out = file_choice.choose(resolved.files, unsafe_weights, trust_remote_code)
    file_choice.require_weights(resolved.source, chosen, resolved.files, unsafe_weights)
    bring = {"hub": _from_hub, "folder": _from_folder, "s3": _from_s3}[resolved.kind]
    sizes = {name: resolved.files[name] for name in chosen}
    _require_space(resolved, folder, sizes)
    meter = _Meter(sum(sizes.values()), progress)
    described = [name for name in chosen if name.endswith(".json")]
    try:
        (folder / PARTIAL).mkdir(parents=True, exist_ok=True)
        bring(resolved, described, folder, meter)  # some MB, that can say why the rest should not come
        if not trust_remote_code:
            file_choice.refuse_code(resolved.source, folder, described)
        file_choice.require_shards(resolved.source, folder, described, resolved.files)
        bring(resolved, [name for name in chosen if name not in described], folder, meter)
        shutil.rmtree(folder / PARTIAL)
    except OSError as error:
        known = api.fault(error, resolved.source, resolved.commit)
        raise (
            known if known is not error else Fault(f"{error.filename or folder}: {error.strerror or error}")
        ) from None
    meter.end()
    seconds = round(time.monotonic() - started, 3)
    return {
        "bytes": meter.total,
        "files": len(chosen),
        "sent": meter.sent,
        "seconds": seconds,
        "left_out": left_out,
    }


def fetch_described(resolved: Resolved, folder: Path, trust_remote_code: bool) -> None:
    """Bring what describes a model, its tokenizer among it, and no weights: some MB."""
    chosen, _ = file_choice.choose(resolved.files, False, trust_remote_code)
    names = [name for name in chosen if "/" not in name and not file_choice.is_weights(name)]
    fetch_named(resolved, names, folder)
    if not trust_remote_code:
        file_choice.refuse_code(resolved.source, folder, names)


def fetch_named(resolved: Resolved, names: list[str], folder: Path) -> None:
    """Bring these files into the folder, whatever they are."""
    bring = {"hub": _from_hub, "folder": _from_folder, "s3": _from_s3}[resolved.kind]
    try:
        (folder / PARTIAL).mkdir(parents=True, exist_ok=True)
        bring(resolved, names, folder, _Meter(0, None))
    except OSError as error:
        raise Fault(f"{error.filename or folder}: {error.strerror or error}") from None


def fetch_objects(
    uri: str, objects: dict[str, tuple[int, str]], folder: Path, progress: Progress | None = None
) -> None:
    """Bring objects of S3, with the sizes and ETags that they were listed with, into the folder."""
    sizes = {name: size for name, (size, _) in objects.items()}
    listed = Resolved("s3", uri, "", sizes, {name: f"etag:{tag}" for name, (_, tag) in objects.items()})
    _require_space(listed, folder, sizes)
    meter = _Meter(sum(sizes.values()), progress)
    try:
        (folder / PARTIAL).mkdir(parents=True, exist_ok=True)
        _from_s3(listed, [*sizes], folder, meter)
        shutil.rmtree(folder / PARTIAL)
    except OSError as error:
        raise Fault(f"{error.filename or folder}: {error.strerror or error}") from None
    meter.end()


class _Meter:
    """Counter of bytes in place or on their way, reported at most every half second.

    No thread waits for another's report.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.sent = total, 0, 0
        self._progress, self._told = progress, 0.0
        self._counting, self._telling = Lock(), Lock()

    def add(self, count: int, sent: bool = False) -> None:
        with self._counting:
            self.done += count
            self.sent += count if sent else 0
        if time.monotonic() - self._told >= EVERY and self._telling.acquire(blocking=False):
            try:
                self._tell()
            finally:
                self._telling.release()

    def end(self) -> None:
        with self._telling:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._progress:
            self._progress(self.done, self.total)


def _from_hub(resolved: Resolved, names: list[str], folder: Path, meter: _Meter) -> None:
    from huggingface_hub import hf_hub_download, hf_hub_url

    api.require_online(resolved.source)
    api.keep_addresses_out_of_logs()
    at = api.endpoint()

    def one(name: str, stopped: Event) -> None:
        size, digest, path = resolved.files[name], resolved.digests[name], folder / name
        if holds(path, digest, size, meter.add):
            return
        part = _part(folder, name, digest)
        try:
            if size > HTTP_LIMIT:
                aside = part.with_suffix(".whole")
                whole = hf_hub_download(resolved.source, name, revision=resolved.commit, local_dir=aside, endpoint=at)
                Path(whole).rename(part)
                shutil.rmtree(aside)
            url = hf_hub_url(resolved.source, name, revision=resolved.commit, endpoint=at)
            api.receive(url, part, size, digest, meter.add, stopped)
        except CancelledError:
            raise
        except Exception as error:
            raise api.fault(error, resolved.source, resolved.commit) from None
        path.parent.mkdir(parents=True, exist_ok=True)
        part.rename(path)

    _side_by_side(one, sorted(names, key=lambda name: -resolved.files[name]))


def _from_folder(resolved: Resolved, names: list[str], folder: Path, meter: _Meter) -> None:
    source = Path(resolved.source).expanduser()

    def one(name: str, stopped: Event) -> None:
        size, digest, path = resolved.files[name], resolved.digests[name], folder / name
        if holds(path, digest, size, meter.add):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        part = _part(folder, name, digest)
        part.unlink(missing_ok=True)
        original = (source / name).resolve()  # the Hub's cache holds links to blobs
        if size < LINK_FROM or not _link(original, part):
            shutil.copyfile(original, part)
        if not holds(part, digest, size, meter.add):
            raise Fault(f"{original}: it changed since the folder was looked at; start again")
        part.rename(path)

    _side_by_side(one, names)


def _link(original: Path, part: Path) -> bool:
    try:
        os.link(original, part)
    except OSError:  # another file system, one without links, or another's file
        return False
    return True


def _from_s3(resolved: Resolved, names: list[str], folder: Path, meter: _Meter) -> None:
    store = _open_store(resolved.source)

    def one(name: str, stopped: Event) -> None:
        size, path = resolved.files[name], folder / name
        digest = s3_source.digest(store, name, size, resolved.digests[name].removeprefix("etag:"))
        if holds(path, digest, size, meter.add):
            return
        part = _part(folder, name, resolved.digests[name])
        s3_source.receive(store, name, part, size, digest, meter.add, stopped)
        path.parent.mkdir(parents=True, exist_ok=True)
        part.rename(path)

    _side_by_side(one, sorted(names, key=lambda name: -resolved.files[name]))


def _open_store(uri: str):
    from tasks.store import open_store

    return open_store(uri)


def _part(folder: Path, name: str, digest: str) -> Path:
    """The file that a download grows in, named by the content wanted: a part of another commit is not continued."""
    return folder / PARTIAL / checksums.of(f"{name}\0{digest}")[:32]


def _side_by_side(one: Callable[[str, Event], None], names: Iterable[str]) -> None:
    """Call one(name, stopped) for each name, some at a time. The first error stops the others and is raised."""
    stopped = Event()
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool:
        try:
            futures = [pool.submit(one, name, stopped) for name in names]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also on Ctrl-C and where a task is cancelled
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, CancelledError)):  # what made the others stop first
        raise error


def _resolve_folder(source: str, only: Collection[str]) -> Resolved:
    folder = Path(source).expanduser()
    sizes, digests = {}, {}

    def one(name: str, stopped: Event) -> None:
        path = folder / name
        if path.is_symlink() and not path.exists():
            raise Fault(f"{path}: a link to {path.readlink()}, which is not there; fetch the model again")
        try:
            with regular_files.open_regular(path) as file:
                digests[name] = f"sha256:{checksums.of_stream(file)}"
                sizes[name] = file.tell()
        except OSError as error:
            raise Fault(f"{path}: {error.strerror}") from None

    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]
    _side_by_side(one, [name for name in names if not re.search(r"(^|/)\.", name) and (not only or name in only)])
    if not sizes and not only:
        raise Fault(f"{source}: an empty folder; a model has its config.json and weights there")
    return Resolved("folder", source, checksums.of_json(digests), sizes, digests)


def _require_space(resolved: Resolved, folder: Path, sizes: dict[str, int]) -> None:
    """Refuse what cannot fit before a byte is sent. Files and parts that are there already are not counted again."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if resolved.kind == "folder" and Path(resolved.source).expanduser().stat().st_dev == there.stat().st_dev:
        return  # links
    begun = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    missing = sum(sizes.values()) - begun
    free = shutil.disk_usage(there).free
    if missing > 0 and missing + SPARE > free:
        needed, left = unlike(missing + SPARE, free)
        raise Fault(
            f"{folder}: {resolved.source} needs {needed} more and the disk has {left} free; "
            "free some space, or name a folder on a larger disk by FINETUNE_RUNS"
        )
