"""Released models from the Hub, a folder or S3, at a pinned state, complete and verified.

    resolved = resolve("zai-org/GLM-4.7", "main")       one request; nothing is fetched
    result = fetch(resolved, Path("model"), unsafe_weights=False, trust_remote_code=False, progress=print)

A source is an existing folder, s3://bucket/prefix (read with tasks.store), or org/name, a model of the Hub. For
tiny://KIND the caller runs trainer.tiny. Data sets are not covered, except that fetch_objects() fetches any objects of
S3.

fetch() may be killed and called again: it hashes and keeps complete files, and continues a partial file in
folder/.partial. Large files of a folder are linked if possible: replace them in the source, never write into them.
"""

# pyright: reportArgumentType=false

import contextlib
import functools
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from conf.model_files import config_json as config_files
from conf.model_files import weights
from contract import checksums, json_object, regular_files
from contract.amounts import unlike
from contract.faults import Fault, named
from tasks.sources.hub import api, file_choice, s3_source
from tasks.sources.hub.digests import holds
from tasks.store import open_store
from tasks.store.folder import PARTIAL, Meter, Progress, partial_name, work_through

PARALLEL = 8  # files at a time, as in snapshot_download
HTTP_LIMIT = 50 * 10**9  # bytes; the Hub serves larger files only with Xet
LINK_FROM = 2**20  # bytes; smaller files are copied, as users edit a config.json in place but write new weights
HIDDEN = re.compile(rf"(^|/)\.(?!{weights.DESCRIPTION[1:]}$)")
SPARE = 64 * 2**20  # bytes that stay free on the disk


@dataclass(frozen=True)
class Resolved:
    kind: str  # hub, folder, s3 or tiny
    source: str
    commit: str  # equal commits are equal files
    files: dict[str, int]  # sizes by name
    digests: dict[str, str] = field(default_factory=dict)  # sha256:..., git:... (a blob's sha1) or etag:...

    @property
    def content(self) -> dict[str, str]:
        """Digests by name, sorted."""
        return {name: self.digests[name] for name in sorted(self.files)}


def kind(source: str) -> str:
    """Kind of a source: hub, folder, s3 or tiny. Raises a Fault for a path that does not exist."""
    scheme, separator, _ = source.partition("://")
    if not source or (separator and scheme not in ("s3", "tiny")):
        raise Fault(
            f"model.source: {source}: not a source of models; use org/name on the Hub, a folder, s3://... or tiny://..."
        )
    if separator:
        return scheme
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.exists():
        raise Fault(f"model.source: {source}: a file; a model is a folder with a config.json and weights")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise Fault(f"model.source: {source}: no such folder{regular_files.or_meant(path)}")
    return "hub"


def resolve(source: str, revision: str = "main", only: Collection[str] = ()) -> Resolved:
    """Pin the current content of the source, or of the files in `only`. The revision is used for the Hub only."""
    resolved = _resolve(source, revision, only)
    if not only:
        return resolved
    kept = {name: size for name, size in resolved.files.items() if name in only}
    return replace(resolved, files=kept, digests={name: resolved.digests[name] for name in kept})


def _resolve(source: str, revision: str, only: Collection[str]) -> Resolved:
    source_kind = kind(source)
    assert source_kind != "tiny", "a tiny model is created, not fetched"
    if source_kind == "folder":
        return _resolve_folder(source, only)
    if source_kind == "s3":
        objects = open_store(source).keys("")
        if not objects:
            raise Fault(f"{source}: contains no objects; check the bucket and the prefix")
        return _listed(source, objects, checksums.of_json(objects))
    try:
        commit, sizes, digests = api.describe(source, revision or "main")
    except api.NotThere as fault:
        raise Fault(f"{fault}{regular_files.or_meant(Path(source))}") from None
    if bad := [name for name in sizes if file_choice.unsafe_name(name)]:
        raise Fault(f"{source}: {bad[0]!r} is not a name of a file inside a folder; do not use this repository")
    return Resolved("hub", source, commit, sizes, digests)


def _listed(uri: str, objects: dict[str, tuple[int, str]], commit: str = "") -> Resolved:
    sizes = {name: size for name, (size, _) in objects.items()}
    return Resolved("s3", uri, commit, sizes, {name: f"etag:{tag}" for name, (_, tag) in objects.items()})


def fetch(
    resolved: Resolved, folder: Path, unsafe_weights: bool, trust_remote_code: bool, progress: Progress | None = None
) -> dict:
    """Fetch the files that a model needs into the folder. Returns counts, and the skipped files with the reasons."""
    started = time.monotonic()
    chosen, left_out = file_choice.choose(resolved.files, unsafe_weights, trust_remote_code)
    file_choice.require_weights(resolved.source, chosen, resolved.files, unsafe_weights)
    described = [name for name in chosen if name.endswith(".json")]
    with _transfer(resolved, chosen, folder, progress) as meter:
        _fetch(resolved, described, folder, meter)  # a few MB, which may show that the model is unusable
        if not trust_remote_code:
            file_choice.refuse_code(resolved.source, folder, described)
        file_choice.require_shards(resolved.source, folder, described, resolved.files)
        _fetch(resolved, [name for name in chosen if name not in described], folder, meter)
    seconds = round(time.monotonic() - started, 3)
    return {"bytes": meter.total, "files": len(chosen), "sent": meter.sent, "seconds": seconds, "left_out": left_out}


def fetch_described(resolved: Resolved, folder: Path, trust_remote_code: bool) -> None:
    """Fetch the files that describe a model, including its tokenizer, without weights: a few MB."""
    chosen, _ = file_choice.choose(resolved.files, False, trust_remote_code)
    names = [name for name in chosen if "/" not in name and not file_choice.is_weights(name)]
    fetch_named(resolved, names, folder)
    if not trust_remote_code:
        file_choice.refuse_code(resolved.source, folder, names)


def fetch_named(resolved: Resolved, names: list[str], folder: Path, progress: Progress | None = None) -> None:
    """Fetch these files into the folder."""
    with _transfer(resolved, names, folder, progress) as meter:
        _fetch(resolved, names, folder, meter)


def config_json(source: str, revision: str) -> dict[str, Any]:
    """The source's current config.json, without the rest of the model. Raises a Fault if it has none.

    Not covered: tiny://KIND, which is not on a disk yet.
    """
    resolved = resolve(source, revision, only=(config_files.NAME,))
    if config_files.NAME not in resolved.files:
        raise Fault(f"{source}: has no {config_files.NAME}; a model has one next to its weights")
    with TemporaryDirectory(prefix="config-") as folder:
        fetch_named(resolved, [config_files.NAME], Path(folder))
        content = (Path(folder) / config_files.NAME).read_bytes()
    return json_object.parse(content, f"{source}: its {config_files.NAME}")


def fetch_objects(
    uri: str, objects: dict[str, tuple[int, str]], folder: Path, progress: Progress | None = None
) -> None:
    """Fetch objects of S3 into the folder, if they still have the listed sizes and ETags."""
    fetch_named(_listed(uri, objects), [*objects], folder, progress)


@contextlib.contextmanager
def _transfer(resolved: Resolved, names: list[str], folder: Path, progress: Progress | None) -> Iterator[Meter]:
    """Check the space for these files, and keep the folder of partial files. Errors of the disk become one line."""
    total = sum(resolved.files[name] for name in names)
    _require_space(resolved, folder, total)
    meter = Meter(progress, total)
    try:
        (folder / PARTIAL).mkdir(parents=True, exist_ok=True)
        yield meter
        shutil.rmtree(folder / PARTIAL)
    except OSError as error:
        known = api.fault(error, resolved.source, resolved.commit)
        other = Fault(f"{error.filename or folder}: {error.strerror or error}")
        raise (other if known is error else known) from None
    meter.end()


def _fetch(resolved: Resolved, names: list[str], folder: Path, meter: Meter) -> None:
    """Fetch files in threads, the largest first. The first error stops the others and is raised."""
    stopped, store = Event(), open_store(resolved.source) if resolved.kind == "s3" else None
    if resolved.kind == "hub":
        api.require_online(resolved.source)
        api.keep_addresses_out_of_logs()

    def fetch_file(name: str) -> None:
        size, digest, path = resolved.files[name], resolved.digests[name], folder / name
        part = folder / PARTIAL / partial_name(name, digest)
        if store:
            digest = s3_source.digest(store, name, size, digest.removeprefix("etag:"))
        if holds(path, digest, size, meter.add):
            return
        if store:
            s3_source.receive(store, name, part, size, digest, meter.add, stopped)
        elif resolved.kind == "hub":
            _from_hub(resolved, name, part, meter, stopped)
        else:
            _from_folder(resolved, name, part, meter)
        path.parent.mkdir(parents=True, exist_ok=True)
        part.rename(path)

    smallest_first = sorted(names, key=resolved.files.__getitem__)
    work_through([functools.partial(fetch_file, name) for name in smallest_first], PARALLEL, stopped)


def _from_hub(resolved: Resolved, name: str, part: Path, meter: Meter, stopped: Event) -> None:
    from huggingface_hub import hf_hub_download, hf_hub_url

    source, size, endpoint = resolved.source, resolved.files[name], api.endpoint()
    try:
        if size > HTTP_LIMIT:
            aside = part.with_suffix(".whole")
            whole = hf_hub_download(source, name, revision=resolved.commit, local_dir=aside, endpoint=endpoint)
            Path(whole).rename(part)
            shutil.rmtree(aside)
        url = hf_hub_url(source, name, revision=resolved.commit, endpoint=endpoint)
        api.receive(url, part, size, resolved.digests[name], meter.add, stopped)
    except CancelledError:
        raise
    except Exception as error:
        raise api.fault(error, source, resolved.commit) from None


def _from_folder(resolved: Resolved, name: str, part: Path, meter: Meter) -> None:
    size = resolved.files[name]
    original = (Path(resolved.source).expanduser() / name).resolve()  # the Hub's cache contains links to blobs
    part.unlink(missing_ok=True)
    if size >= LINK_FROM:
        with contextlib.suppress(OSError):  # another file system, one without links, or a file of another user
            os.link(original, part)
    if not part.exists():
        shutil.copyfile(original, part)
    if not holds(part, resolved.digests[name], size, meter.add):
        raise Fault(f"{original}: it has changed since the run began; start again")


def _resolve_folder(source: str, only: Collection[str]) -> Resolved:
    folder = Path(source).expanduser()
    sizes, digests = {}, {}

    def read(name: str) -> None:
        path = folder / name
        if path.is_symlink() and not path.exists():
            raise Fault(f"{path}: a link to {path.readlink()}, which does not exist; fetch the model again")
        with named(path, OSError), regular_files.open_regular(path) as file:
            digests[name] = f"sha256:{checksums.of_stream(file)}"
            sizes[name] = file.tell()

    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]
    names = [name for name in names if not HIDDEN.search(name) and (not only or name in only)]
    work_through([functools.partial(read, name) for name in names], PARALLEL)
    if not sizes and not only:
        raise Fault(f"{source}: an empty folder; it must contain the model's config.json and weights")
    return Resolved("folder", source, checksums.of_json(digests), sizes, digests)


def _require_space(resolved: Resolved, folder: Path, size: int) -> None:
    """Refuse a fetch without enough free space before it begins. Files and parts in the folder count as fetched."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if resolved.kind == "folder" and Path(resolved.source).expanduser().stat().st_dev == existing.stat().st_dev:
        return  # files are linked
    begun = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    missing = size - begun
    free = shutil.disk_usage(existing).free
    if missing > 0 and missing + SPARE > free:
        needed, left = unlike(missing + SPARE, free)
        raise Fault(
            f"{folder}: {resolved.source} needs {needed} more and the disk has {left} free; "
            "free some space, or set FINETUNE_RUNS to a folder on a larger disk"
        )
