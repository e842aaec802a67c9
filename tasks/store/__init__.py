"""Object store for the output of every stage: s3://bucket/prefix or a folder, with one interface.

    open_store("s3://bucket/runs")     boto3 (tasks/store/s3.py); credentials and endpoint from its standard chain
    open_store("file:///mnt/runs")     a folder, also on NFS, also as a plain path (tasks/store/local.py)

Keys and names are relative, with slashes; `prefix` means everything below prefix + "/". All methods are safe to call
from several threads, processes and hosts. A problem with the caller's store or folder is a contract.faults.Fault of one
line without credentials.

Not covered: other stores, object versions, custom encryption keys (use the bucket's default).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from contract.faults import Fault
from tasks.store.folder import File, Progress
from tasks.store.local import LocalStore
from tasks.store.s3 import S3Store

__all__ = ["File", "Progress", "Store", "open_store"]


class Store(Protocol):
    @property
    def uri(self) -> str:
        """Address of the store: s3://bucket/prefix or file:///abs/path, without credentials."""
        ...

    def read(self, key: str) -> tuple[bytes, str] | None:
        """A small object and its tag; None if absent."""
        ...

    def create(self, key: str, data: bytes) -> str | None:
        """Write only if absent, atomically. Returns the tag, or None if the object exists."""
        ...

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """Write only over an object with this tag. Returns the new tag, or None if the object changed meanwhile."""
        ...

    def write(self, key: str, data: bytes) -> str:
        """Write or overwrite the object. The write is atomic and durable."""
        ...

    def remove(self, key: str, tag: str | None = None) -> bool:
        """Remove the object; with a tag, only if it still has that tag. Returns whether it was removed."""
        ...

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Size and tag of every object below the prefix, by name relative to it."""
        ...

    def put(self, folder: Path, prefix: str, progress: Progress | None = None) -> dict[str, File]:
        """Make the content below the prefix equal to the folder. A repeated transfer sends only missing content."""
        ...

    def get(self, prefix: str, files: dict[str, File], folder: Path, progress: Progress | None = None) -> None:
        """Fetch the files into the folder, each verified. A repeated transfer fetches only missing content."""
        ...

    def changed(self, prefix: str, files: dict[str, File], deep: bool = False) -> dict[str, str]:
        """Problems of files that differ from their records: "missing", "size 3, not 4" or "content differs".

        A file with the recorded tag counts as unchanged. With `deep`, it is read and hashed instead.
        """
        ...

    def place(self, prefix: str) -> Path | None:
        """The folder in which the files can be read directly, or None. Callers must never write there."""
        ...

    def link(self, prefix: str) -> str:
        """URI of the content below the prefix."""
        ...

    def delete(self, prefix: str) -> int:
        """Remove everything below the prefix. Returns the number of bytes freed."""
        ...


def open_store(uri: str, hasty: bool = False) -> Store:
    """The store at s3://bucket/prefix, file:///folder or a plain path. Nothing is contacted or created yet.

    With `hasty`, a request to S3 fails after seconds without an answer. It is for callers that repeat their requests.
    """
    scheme, colon, _ = uri.partition("://")
    if not colon:
        if not uri:
            raise Fault("store: empty; it must be s3://bucket/prefix or a folder")
        try:
            return LocalStore(Path(uri).expanduser().absolute())
        except RuntimeError:
            raise Fault(f"store: {uri}: no such home folder; write the full path") from None
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise Fault(f"store: not a URI of the form {scheme}://...") from None
    if "@" in parts.netloc:  # the message leaves it out, as it may be a key and its secret
        raise Fault(f"store: {scheme}://...@...: a URI with credentials; leave them to the environment or ~/.aws")
    if parts.query or parts.fragment:
        raise Fault(f"store: {scheme}://{parts.netloc}{parts.path}: must not contain ? or #")
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise Fault(f"store: {uri}: names a host, {parts.netloc!r}; file:///folder has three slashes")
        return LocalStore(Path(unquote(parts.path)))
    if scheme == "s3":
        if not parts.netloc:
            raise Fault(f"store: {uri}: has no bucket; write s3://bucket/prefix")
        return S3Store(parts.netloc, parts.path.strip("/"), hasty)
    raise Fault(f"store: {scheme}://: unknown kind of store; use s3://bucket/prefix or file:///folder")
