"""Objects in S3 that any tool may have written: digests, as far as S3 knows them, and resumable downloads."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from contract.faults import Fault
from tasks.sources.hub.digests import Partial, complete
from tasks.store import open_store
from tasks.store.s3_bucket import S3Bucket, tag_of
from tasks.store.s3_download import stream
from tasks.store.s3_errors import Refused, plainly


def look(uri: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Find the object at the URI, or all below it. Returns their parent URI, and sizes and ETags by relative name."""
    store = open_store(uri)
    folder, _, name = store.uri.rpartition("/")
    if folder != "s3:/" and not uri.endswith("/"):
        above: Any = open_store(folder)
        with contextlib.suppress(Refused), plainly(above):
            head = above.client.head_object(Bucket=above.bucket, Key=above.at(name))
            return folder, {name: (head["ContentLength"], tag_of(head))}
    return store.uri, store.keys("")


def digest(store, name: str, size: int, tag: str) -> str:
    """The digest of the object's content. Raises a Fault if the object has changed since it was listed."""
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


def receive(store: S3Bucket, name: str, part: Path, size: int, digest: str, count: Callable, stopped: Event) -> None:
    """Complete `part` with the object."""

    def receive_rest(partial: Partial) -> None:
        for chunk in stream(store, store.at(name), partial.done, size, size):
            partial.write(chunk)

    with plainly(store):
        if not complete(part, digest, size, count, stopped, receive_rest):
            raise changed(store, name)


def changed(store, name: str) -> Fault:
    return Fault(f"{store.uri}/{name}: it has changed since it was listed; start again when it is no longer written to")
