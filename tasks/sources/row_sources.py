"""Sources of rows: the present content of each, and how the host that prepares them gets at it.

    identity(part, "data.source", memory)      files by their content, the Hub by its commit, S3 by sizes and ETags
    local(part, identity, folder, progress)    the part as preparation reads it: S3 fetched, the Hub at the commit

A file that was moved or renamed is the same source. Its ending counts, as it says how the file is read.
trainer/prepare.py reads the files; their rows are not looked at here.
"""

import glob
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from conf.schema import row_files
from conf.schema.data import Part
from contract import checksums, indexed_files, regular_files
from contract.faults import Fault
from tasks.sources import hub
from tasks.sources.file_digests import digests
from tasks.sources.hub import api, file_choice, s3_source

MADE = {  # here, with the shape of their rows
    "tiny://tickets": "pairs",
    "tiny://mistaken-tickets": "pairs",
    "tiny://ranked-tickets": "preference",
    "tiny://texts": "text",
}


def kind(source: str, key: str) -> str:
    """Kind of a source: tiny, s3, local or hub. `key` is the source's name in the configuration."""
    scheme, separator, _ = source.partition("://")
    if separator:
        if scheme == "tiny" and source not in MADE:
            *others, last = MADE
            raise Fault(f"{key}: {source}: no such data; there is {', '.join(others)} and {last}")
        if scheme not in ("tiny", "s3"):
            raise Fault(f"{key}: {source}: no source of data; it is a file, a folder, org/name on the Hub or s3://...")
        return scheme
    path = Path(source).expanduser()
    if path.exists() or glob.has_magic(source) or _indexed(path, key):
        return "local"
    if path.is_symlink():
        raise Fault(f"{key}: {source}: a link to {path.readlink()}, which is not there")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1 or row_files.format_of(source):
        raise Fault(f"{key}: {source}: no such file{regular_files.or_meant(path)}")
    return "hub"


def shape(part: Part) -> str | None:
    """Shape of a source's rows, as far as it is known without a look at them."""
    if part.shape != "auto":
        return part.shape
    return None if part.input or part.output or part.text else MADE.get(part.source or "")


def identity(part: Part, key: str, memory: Path) -> dict[str, Any]:
    """Identity of a source: equal for two sources with the same rows.

    `memory` holds digests of files that were read before.
    """
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
    part: Part, found: dict[str, Any], key: str, folder: Path, progress: Callable[[int, int], None] | None = None
) -> Part:
    """Fetch the content that identity() found, and return the part as it is read on this host.

    Nothing is fetched twice.
    """
    assert part.source
    match kind(part.source, key):
        case "hub":
            return part.model_copy(update={"revision": found["commit"]})
        case "local":
            return part.model_copy(update={"source": str(Path(part.source).expanduser().absolute())})
        case "s3":
            uri, objects = row_objects(part.source, key)
            if [[name, size, tag] for name, (size, tag) in sorted(objects.items())] != found["objects"]:
                raise Fault(f"{key}: {part.source}: its objects have changed since the run began; start it again")
            hub.fetch_objects(uri, objects, folder, progress)
            return part.model_copy(update={"source": str(folder)})
    return part


def _ending(name: str) -> str:
    path = Path(name)
    return path.suffix if indexed_files.are([path]) else row_files.format_of(path) + row_files.compression(path)


def _indexed(path: Path, key: str) -> list[Path]:
    try:
        return indexed_files.of(path)
    except Fault as fault:
        raise Fault(f"{key}: {fault}") from None


def _content(source: str, key: str, memory: Path) -> str:
    read = files(source, key)
    try:
        found = digests(read, memory)
    except Fault as fault:
        raise Fault(f"{key}: {fault}") from None
    lines = [f"{_ending(file.name)} {digest}\n" for file, digest in zip(read, found, strict=True)]
    return checksums.of("".join(lines))


def files(source: str, key: str) -> list[Path]:
    """Files in the order in which preparation reads them."""
    path = Path(source).expanduser()
    if indexed_files.is_prefix(path):
        found = _indexed(path, key)
    elif path.is_dir():
        try:
            found = row_files.inside(path)
        except Fault as fault:
            raise Fault(f"{key}: {fault}") from None
        found = (row_files.only_texts(found) and _indexed(path, key)) or found
    elif path.exists():
        if not path.is_file():
            raise Fault(f"{key}: {source}: neither a file nor a folder")
        found = [path] if row_files.format_of(path) else _indexed(path, key)
    elif not (found := _indexed(path, key)):
        matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
        found = [match for match in matches if row_files.format_of(match) and match.is_file()]
        found = found or indexed_files.both(matches)
    if not found:
        what = "no file of rows in this folder" if path.is_dir() else "no file of rows"
        what = what if path.exists() else "no file of rows has such a name"
        raise Fault(f"{key}: {source}: {what}; they end in {row_files.ENDINGS}")
    return sorted(found)


def row_objects(source: str, key: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The URI above all objects of rows, and the size and ETag of each by its name below that URI."""
    try:
        uri, objects = s3_source.look(source)
        if row_files.only_texts(row_files.among(objects)) and not source.endswith("/"):
            uri, objects = _indexed_objects(source) or (uri, objects)
    except Fault as fault:
        raise Fault(f"{key}: {fault}") from None
    if not objects:
        raise Fault(f"{key}: {source}: nothing lies there; check the bucket and the prefix, which is no pattern")
    found = row_files.among(objects)
    found = (row_files.only_texts(found) and _pairs(objects, key)) or found
    if not found:
        raise Fault(
            f"{key}: {source}: none of the {len(objects)} objects there is a file of rows, such as {min(objects)}; "
            f"they end in {row_files.ENDINGS}"
        )
    if bad := next((name for name in found if file_choice.unsafe_name(name)), None):
        raise Fault(f"{key}: {source}: {bad!r} is no name of a file inside a folder; rename it")
    return uri, {name: objects[name] for name in found}


def _indexed_objects(source: str) -> tuple[str, dict[str, tuple[int, str]]] | None:
    """Both objects of a .bin/.idx that is named by its prefix or by one of them, as row_objects() has them."""
    prefix, found, above = source.removesuffix(indexed_files.BIN).removesuffix(indexed_files.IDX), {}, ""
    for ending in (indexed_files.BIN, indexed_files.IDX):
        uri, one = s3_source.look(f"{prefix}{ending}")
        above, found = (uri if one else above), found | one
    return (above, found) if found else None


def _pairs(objects: dict[str, tuple[int, str]], key: str) -> list[str]:
    names = {PurePosixPath(name) for name in objects}
    indexes = [name for name in names if name.suffix == indexed_files.IDX]
    indexes = indexes or [name for name in names if indexed_files.are(names)]  # a .bin alone lacks its index
    try:
        return [str(name) for name in indexed_files.both(indexes, names.__contains__)]
    except Fault as fault:
        raise Fault(f"{key}: {fault}") from None


def _commit(source: str, revision: str, key: str) -> str:
    """The commit that the data set's revision names on the Hub now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hub = HfApi(endpoint=api.endpoint())
        found = api.patiently(lambda: hub.dataset_info(source, revision=revision, timeout=30)).sha
    except HFValidationError:
        raise Fault(f"{key}: {source}: no such file, and no data set's name on the Hub (org/name)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise Fault(
            f"{key}: {source}@{revision}: the Hub says {status}; check the name, the revision, and the token "
            "(hf auth login) of a private or gated data set"
        ) from None
    except Exception as error:
        raise api.fault(error, f"{key}: {source}", revision) from None
    assert found
    return found
