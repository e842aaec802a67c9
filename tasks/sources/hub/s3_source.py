"""Objects in S3 that any tool may have written: digests, as far as S3 knows them, and resumable downloads."""

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event

from contract.faults import Fault
from tasks.sources.hub.digests import CHUNK, Check


def look(uri: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Find the object at the URI, or all below it. Returns their parent URI, and sizes and ETags by relative name."""
    from tasks.store import open_store
    from tasks.store.s3_errors import Refused

    store = open_store(uri)
    folder, _, name = store.uri.rpartition("/")
    if folder != "s3:/" and not uri.endswith("/"):
        above = open_store(folder)
        with contextlib.suppress(Refused):
            return folder, {name: _size_and_tag(above, name)}
    return store.uri, store.keys("")


def _size_and_tag(store, name: str) -> tuple[int, str]:
    from tasks.store.s3_bucket import tag_of
    from tasks.store.s3_errors import plainly

    with plainly(store):
        head = store.client.head_object(Bucket=store.bucket, Key=store.at(name))
        return head["ContentLength"], tag_of(head)


def digest(store, name: str, size: int, tag: str) -> str:
    """The digest of the object's content. Raises a Fault if the object has changed since it was listed."""
    from tasks.store.s3_errors import plainly

    where = {"Bucket": store.bucket, "Key": store.at(name)}
    with plainly(store):
        head = store.client.head_object(**where)
        if head["ETag"].strip('"') != tag or head["ContentLength"] != size:
            raise changed(store, name)
        if sha256 := head.get("Metadata", {}).get("sha256"):
            return f"sha256:{sha256}"
        if "kms" in head.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in head:
            return f"size:{size}"
        if re.fullmatch(r"[0-9a-f]{32}", tag):
            return f"md5:{tag}"
        if re.fullmatch(r"[0-9a-f]{32}-\d+", tag):
            part = store.client.head_object(**where, PartNumber=1)["ContentLength"]
            if -(-size // part) == int(tag.partition("-")[2]):
                return f"parts-{part}:{tag}"
    return f"size:{size}"


def receive(store, name: str, part: Path, size: int, digest: str, count: Callable, stopped: Event) -> None:
    """Complete `part` with the object. The bytes of an earlier attempt are kept."""
    from tasks.store.s3_download import stream
    from tasks.store.s3_errors import plainly

    for last in (False, True):
        check = Check(digest, size)
        with part.open("a+b") as out, plainly(store):
            if out.tell() > size:
                out.truncate(0)
            out.seek(0)
            while chunk := out.read(CHUNK):
                check.update(chunk)
                count(len(chunk))
            for chunk in stream(store, store.at(name), out.tell(), size, size):
                if stopped.is_set():
                    raise CancelledError  # another file failed; this one stays partial
                out.write(chunk)
                check.update(chunk)
                count(len(chunk), sent=True)
        if check.right():
            return
        count(-size)
        part.unlink()
        if last:
            raise changed(store, name)


def changed(store, name: str) -> Fault:
    return Fault(f"{store.uri}/{name}: it has changed since it was listed; start again when it is no longer written to")
