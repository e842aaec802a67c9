"""Object store for the output of every stage: s3://bucket/prefix or a folder, with the methods of LocalStore.

    open_store("s3://bucket/runs")     boto3 (tasks/store/s3.py); credentials and endpoint from its standard chain
    open_store("file:///mnt/runs")     a folder, also on NFS, also as a plain path (tasks/store/local.py)

Keys and names are relative, with slashes; `prefix` means everything below prefix + "/". All methods are safe to call
from several threads, processes and hosts. A problem with the caller's store or folder is a contract.faults.Fault of one
line without credentials.

Not covered: other stores, object versions, custom encryption keys (use the bucket's default).
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from contract.faults import Fault
from tasks.store.folder import File, Progress
from tasks.store.local import LocalStore
from tasks.store.s3 import S3Store

__all__ = ["File", "Progress", "Store", "open_store"]


Store = LocalStore | S3Store


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
