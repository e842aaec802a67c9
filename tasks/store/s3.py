"""Object store in an S3 bucket, or below a prefix of it. Folders are transferred by s3_upload.py and s3_download.py.

Credentials, region and endpoint come from boto3's standard chain (AWS_PROFILE, AWS_ACCESS_KEY_ID, roles;
AWS_ENDPOINT_URL for another S3 than Amazon's) and appear in no message. Requests are tried 8 times with growing pauses
(AWS_MAX_ATTEMPTS and AWS_RETRY_MODE change that). An S3 without an answer is reported after 3 s; the request fails
after 120 s, or after the attempts of 60 s that AWS_MAX_ATTEMPTS allows. Needed: list, get, put, delete and multipart on
the bucket, and conditional writes (If-None-Match, If-Match), which are tested before they are used.

An object's tag is its ETag. Its SHA-256 is stored as metadata; resuming and verification use it.
"""

import contextlib
import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.faults import Fault
from tasks.store.s3_bucket import tag_of
from tasks.store.s3_download import S3Download
from tasks.store.s3_errors import ABSENT, ATTEMPTS, REFUSED, Refused, broken, code_of, lost, pause, plainly, read
from tasks.store.s3_upload import S3Upload


@dataclass(frozen=True)
class S3Store(S3Upload, S3Download):
    """The object store on S3."""

    def read(self, key: str) -> tuple[bytes, str] | None:
        for attempt in range(ATTEMPTS):
            with plainly(self):
                try:
                    answer = self.client.get_object(Bucket=self.bucket, Key=self.at(key))
                except Exception as error:
                    if code_of(error) in ABSENT:
                        return None
                    raise
                with contextlib.suppress(*broken()), contextlib.closing(answer["Body"]) as body:
                    return read(self, body), tag_of(answer)
            pause(attempt)
        raise lost(self.link(key))

    def create(self, key: str, data: bytes) -> str | None:
        return self._write_if(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return self._write_if(key, data, IfMatch=f'"{tag}"')

    def write(self, key: str, data: bytes) -> str:
        with plainly(self):
            return tag_of(self.client.put_object(Bucket=self.bucket, Key=self.at(key), Body=data))

    def remove(self, key: str, tag: str | None = None) -> bool:
        if tag is not None:
            self.conditional  # noqa: B018
        try:
            with plainly(self):
                where = {"Bucket": self.bucket, "Key": self.at(key)}
                stored = tag_of(self.client.head_object(**where))  # S3 reports success for a missing object
                if tag not in (None, stored):
                    return False
                self.client.delete_object(**where, **({"IfMatch": f'"{tag}"'} if tag else {}))
                return True
        except Refused:
            return False

    def place(self, prefix: str) -> Path | None:
        return None

    def link(self, prefix: str) -> str:
        return f"{self.uri}/{prefix}".rstrip("/")

    def delete(self, prefix: str) -> int:
        objects = self.keys(prefix)
        self.remove_all(prefix, objects)
        with plainly(self):
            for key, ids in self.uploads(prefix).items():
                for upload in ids:
                    self.abort(key, upload)
        return sum(size for size, _ in objects.values())

    @functools.cached_property
    def conditional(self) -> bool:
        """Test conditional writes on a temporary object. A store that ignores them would break every lease."""
        key = f".probe-{secrets.token_hex(8)}"
        wrong = '"00000000000000000000000000000000"'
        where = {"Bucket": self.bucket, "Key": self.at(key)}
        with plainly(self):
            self.client.put_object(**where, Body=b"", IfNoneMatch="*")
            try:
                for condition in ({"IfNoneMatch": "*"}, {"IfMatch": wrong}):
                    self._must_refuse(self.client.put_object, condition, **where, Body=b"")
                self._must_refuse(self.client.delete_object, {"IfMatch": wrong}, **where)
            finally:
                self.client.delete_object(**where)
        return True

    def _must_refuse(self, call: Callable, condition: dict, **request: Any) -> None:
        try:
            call(**request, **condition)
        except Exception as error:
            if code_of(error) not in REFUSED:
                raise
        else:
            raise Fault(
                f"{self.uri}: this S3 ignores {next(iter(condition))} on {call.__name__}, so two runs could overwrite "
                "each other; use a store with conditional writes (Amazon's, MinIO, Ceph from 20 on) or a folder"
            )

    def _write_if(self, key: str, data: bytes, **condition: str) -> str | None:
        self.conditional  # noqa: B018
        mark = secrets.token_hex(8)
        where = {"Bucket": self.bucket, "Key": self.at(key)}
        for attempt in range(ATTEMPTS):
            try:
                with plainly(self):
                    return tag_of(self.client.put_object(**where, Body=data, Metadata={"writer": mark}, **condition))
            except Refused as refused:
                if refused.code in ("ConditionalRequestConflict", "409"):  # two writes at the same moment: both failed
                    pause(attempt)
                    continue
                if refused.retried:  # the first try may have succeeded although its answer was lost
                    with plainly(self), contextlib.suppress(Refused):
                        stored = self.client.head_object(**where)
                        if stored.get("Metadata", {}).get("writer") == mark:
                            return tag_of(stored)
                return None
        return None
