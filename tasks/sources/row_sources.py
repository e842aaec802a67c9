"""Sources of rows: their current content, and access for the host that prepares them.

    identity(part, "data.source", memory)      files by their content, the Hub by its commit, S3 by sizes and ETags
    local(part, identity, folder, progress)    the part for preparation: S3 fetched, the Hub at the commit

A moved or renamed file is the same source. Its ending counts, as it determines the format. trainer/prepare.py reads the
files; this module reads no rows.

digests() caches SHA-256 digests of files: a source of 5 GB is not read again at every start of a run. A digest is valid
while the file keeps its size, inode and times. They include the time of the inode's last change (ctime), which every
write changes and no program can set. Times have a limited resolution, so the digest of a file that changed less than
SETTLED before it was read is not cached.

Not covered: clocks that are set back, and writes to the disk that bypass the file system.
"""

# pyright: reportArgumentType=false

import contextlib
import glob
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from conf.schema import row_files
from conf.schema.data import Part
from contract import checksums, indexed_files, json_object, regular_files
from contract.faults import Fault, named
from contract.files import write_atomically
from tasks.sources import hub
from tasks.sources.hub import api, file_choice, s3_source

MADE = {  # sources that the project creates, with the shape of their rows
    "tiny://tickets": "pairs",
    "tiny://mistaken-tickets": "pairs",
    "tiny://ranked-tickets": "preference",
    "tiny://texts": "text",
}
SETTLED = 2.0  # seconds; FAT has that grain, ext4 4 ms
LARGE = 1 << 20  # bytes; reading a smaller file is faster than looking up its digest

Stamp = list[int]


def kind(source: str, key: str) -> str:
    """Kind of a source: tiny, s3, local or hub. `key` is the source's name in the configuration."""
    scheme, separator, _ = source.partition("://")
    if separator:
        if scheme == "tiny" and source not in MADE:
            *others, last = MADE
            raise Fault(f"{key}: {source}: no such data; there is {', '.join(others)} and {last}")
        if scheme not in ("tiny", "s3"):
            raise Fault(f"{key}: {source}: not a source of data; use a file, a folder, org/name on the Hub or s3://...")
        return scheme
    path = Path(source).expanduser()
    with named(key):
        if path.exists() or glob.has_magic(source) or indexed_files.of(path):
            return "local"
    if path.is_symlink():
        raise Fault(f"{key}: {source}: a link to {path.readlink()}, which does not exist")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or row_files.format_of(source):
        raise Fault(f"{key}: {source}: no such file{regular_files.or_meant(path)}")
    return "hub"


def shape(part: Part) -> str | None:
    """Shape of a source's rows, if it is known without reading them."""
    if part.shape != "auto":
        return part.shape
    return None if part.input or part.output or part.text else MADE.get(part.source or "")


def identity(part: Part, key: str, memory: Path) -> dict[str, Any]:
    """Identity of a source: equal for two sources with the same rows. `memory` is the cache of file digests."""
    assert part.source
    match kind(part.source, key):
        case "tiny":
            return {"source": part.source}
        case "s3":
            _, objects = row_objects(part.source, key)
            return {"objects": [[name, size, tag] for name, (size, tag) in sorted(objects.items())]}
        case "local":
            return {"content": _content(part.source, key, memory)}
    commit = _commit(part.source, part.revision, key)
    return {"source": part.source, "config": part.config, "split": part.split, "commit": commit}


def local(
    part: Part, content: dict[str, Any], key: str, folder: Path, progress: Callable[[int, int], None] | None = None
) -> Part:
    """Fetch the content that identity() returned, unless it is present, and return the part as this host reads it."""
    assert part.source
    match kind(part.source, key):
        case "hub":
            return part.model_copy(update={"revision": content["commit"]})
        case "local":
            return part.model_copy(update={"source": str(Path(part.source).expanduser().absolute())})
        case "s3":
            uri, objects = row_objects(part.source, key)
            if [[name, size, tag] for name, (size, tag) in sorted(objects.items())] != content["objects"]:
                raise Fault(f"{key}: {part.source}: its objects have changed since the run began; start it again")
            hub.fetch_objects(uri, objects, folder, progress)
            return part.model_copy(update={"source": str(folder)})
    return part


def _ending(name: str) -> str:
    path = Path(name)
    return path.suffix if indexed_files.are([path]) else row_files.format_of(path) + row_files.compression(path)


def _content(source: str, key: str, memory: Path) -> str:
    paths = files(source, key)
    with named(key):
        contents = digests(paths, memory)
    lines = [f"{_ending(path.name)} {digest}\n" for path, digest in zip(paths, contents, strict=True)]
    return checksums.of("".join(lines))


def files(source: str, key: str) -> list[Path]:
    """Files of a local source, sorted. Their order is part of its identity."""
    with named(key):
        return sorted(row_files.files(source))


def row_objects(source: str, key: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The URI above all objects of rows, and the size and ETag of each by its name below that URI."""
    with named(key):
        uri, objects = s3_source.look(source)
        if row_files.only_texts(row_files.among(objects)) and not source.endswith("/"):
            uri, objects = _indexed_objects(source) or (uri, objects)
    if not objects:
        raise Fault(f"{key}: {source}: contains no objects; check the bucket and the prefix, which is not a pattern")
    names = row_files.among(objects)
    names = (row_files.only_texts(names) and _pairs(objects, key)) or names
    if not names:
        raise Fault(
            f"{key}: {source}: none of its {len(objects)} objects, such as {min(objects)}, is a file of rows; "
            f"their names end in {row_files.ENDINGS}"
        )
    if bad := next((name for name in names if file_choice.unsafe_name(name)), None):
        raise Fault(f"{key}: {source}: {bad!r} is not a name of a file inside a folder; rename it")
    return uri, {name: objects[name] for name in names}


def _indexed_objects(source: str) -> tuple[str, dict[str, tuple[int, str]]] | None:
    """Both objects of a .bin/.idx, named by its prefix or by one of them, in the form of row_objects()."""
    prefix, objects, above = source.removesuffix(indexed_files.BIN).removesuffix(indexed_files.IDX), {}, ""
    for ending in (indexed_files.BIN, indexed_files.IDX):
        uri, part = s3_source.look(f"{prefix}{ending}")
        above, objects = (uri if part else above), objects | part
    return (above, objects) if objects else None


def _pairs(objects: dict[str, tuple[int, str]], key: str) -> list[str]:
    names = {PurePosixPath(name) for name in objects}
    indexes = [name for name in names if name.suffix == indexed_files.IDX]
    indexes = indexes or [name for name in names if indexed_files.are(names)]  # a .bin alone lacks its index
    with named(key):
        return [str(name) for name in indexed_files.both(indexes, names.__contains__)]


def _commit(source: str, revision: str, key: str) -> str:
    """The current commit of the data set's revision on the Hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hub = HfApi(endpoint=api.endpoint())
        commit = api.patiently(lambda: hub.dataset_info(source, revision=revision, timeout=30)).sha
    except HFValidationError:
        raise Fault(f"{key}: {source}: no such file, and no data set's name on the Hub (org/name)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise Fault(
            f"{key}: {source}@{revision}: the Hub answers {status}; check the name, the revision, and the token "
            "(hf auth login) of a private or gated data set"
        ) from None
    except Exception as error:
        raise api.fault(error, f"{key}: {source}", revision) from None
    assert commit
    return commit


def digests(files: Sequence[Path], memory: Path) -> list[str]:
    """Digest of each file. `memory` is a file that may be lost at any time."""
    known = _read(memory)
    result, fresh = [], {}
    for file in files:
        path = str(file.resolve())
        with named(file, OSError):
            stamp = _stamp(file)
            if known.get(path, {}).get("stamp") == stamp:
                result.append(known[path]["sha256"])
                continue
            digest = checksums.of_file(file)
            if _stamp(file) != stamp:
                raise Fault(f"{file}: is being written to; start again when it is finished")
        result.append(digest)
        if stamp[0] >= LARGE and time.time() - max(stamp[2:]) / 1e9 > SETTLED:
            fresh[path] = {"stamp": stamp, "sha256": digest}
    if fresh:
        _write(memory, {path: entry for path, entry in known.items() if os.path.exists(path)} | fresh)
    return result


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read(memory: Path) -> dict[str, dict]:
    known = json_object.read_or_empty(memory)
    valid = all(isinstance(entry, dict) and {"stamp", "sha256"} <= entry.keys() for entry in known.values())
    return known if valid else {}


def _write(memory: Path, known: dict[str, dict]) -> None:
    with contextlib.suppress(OSError):  # such as a full disk: the next run reads the files again
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memory, json.dumps(known, indent=1), durable=False)
