"""Access to an S3 bucket below a prefix: its client, and the requests that transfers and the store share."""

# pyright: reportAttributeAccessIssue=false

import functools
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from contract.faults import Fault
from contract.waits import within
from tasks.store.folder import THREADS, checked
from tasks.store.s3_errors import ATTEMPTS, ATTEMPTS_SET, SILENT, address, code_of, plainly

CONNECTS, ANSWERS = 10, 60  # seconds, between two bytes
WHOLE = 130  # seconds of an attempt: to send 16 MiB and receive the answer


@dataclass(frozen=True)
class S3Bucket:
    """Place of a store on S3, with its client."""

    bucket: str
    prefix: str
    hasty: bool = False

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        below = self.below(prefix)
        with plainly(self):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below)
            entries = (entry for page in pages for entry in page.get("Contents", ()))
            # "folders" that consoles create are empty objects whose names end in a slash
            return {e["Key"][len(below) :]: (e["Size"], tag_of(e)) for e in entries if not e["Key"].endswith("/")}

    def remove_all(self, prefix: str, names: Any) -> None:
        below, names = self.below(prefix), list(names)
        with plainly(self):
            for start in range(0, len(names), 1000):  # the limit of one request
                batch = [{"Key": below + name} for name in names[start : start + 1000]]
                answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
                for error in answer.get("Errors", ()):
                    raise Fault(f"s3://{self.bucket}/{error['Key']}: not deleted: {error.get('Code')}; see its policy")

    def uploads(self, prefix: str) -> dict[str, list[str]]:
        """Unfinished multipart uploads below the prefix: their ids by key, the newest last."""
        uploads: dict[str, list[tuple[str, str]]] = {}
        pages = self.client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self.bucket, Prefix=self.below(prefix)):
            for upload in page.get("Uploads", ()):
                uploads.setdefault(upload["Key"], []).append((str(upload["Initiated"]), upload["UploadId"]))
        return {key: [upload for _, upload in sorted(ids)] for key, ids in uploads.items()}

    def abort(self, key: str, upload: str) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
        except Exception as error:
            if code_of(error) not in ("NoSuchUpload", "404"):
                raise

    def at(self, *names: str) -> str:
        name = checked("/".join(part for part in names if part))
        return f"{self.prefix}/{name}" if self.prefix else name

    def below(self, prefix: str) -> str:
        return self.at(prefix) + "/" if prefix else self.prefix + "/" if self.prefix else ""

    @functools.cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        logger = logging.getLogger("botocore")  # at DEBUG it logs the headers that sign each request, including tokens
        if logger.getEffectiveLevel() < logging.INFO:
            logger.setLevel(logging.INFO)
        settings: dict[str, Any] = {}
        default_retries = not any(map(os.environ.get, ATTEMPTS_SET))
        if default_retries:
            settings["retries"] = {"mode": "standard", "max_attempts": 2 if self.hasty else ATTEMPTS}
        if os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3"):
            settings["s3"] = {"addressing_style": "path"}  # other stores rarely have a host name per bucket
        with plainly(self, "no client"):
            client = boto3.session.Session().client(
                "s3",
                config=Config(
                    connect_timeout=2 if self.hasty else CONNECTS,
                    read_timeout=4 if self.hasty else ANSWERS,
                    tcp_keepalive=True,
                    max_pool_connections=THREADS,
                    response_checksum_validation="when_required",  # every file's SHA-256 is checked instead
                    **settings,
                ),
            )
        _limit(client, self.uri, 8 if self.hasty else WHOLE, default_retries)
        return client


def _limit(client: Any, uri: str, seconds: float, default_retries: bool) -> None:
    """Limit the time of each attempt, and with the default retries the total time without an answer."""
    from botocore.exceptions import ReadTimeoutError

    session, who = client._endpoint.http_session, f"{uri} at {address(client)}"
    send, retries = session.send, " or ".join(ATTEMPTS_SET)
    then = f"then the request is repeated, for {SILENT} s" if default_retries else f"then {retries} decides"

    def send_within(request: Any) -> Any:
        try:
            return within(seconds, functools.partial(send, request), who, then)
        except TimeoutError:
            raise ReadTimeoutError(endpoint_url=who) from None

    def begin(params: dict, **_: Any) -> None:
        params["context"]["began"] = time.monotonic()

    def end(request_dict: dict, caught_exception: Exception | None, **_: Any) -> None:
        if caught_exception and time.monotonic() - request_dict["context"]["began"] > SILENT:
            raise caught_exception

    session.send = send_within
    if default_retries:
        client.meta.events.register("before-call.s3", begin)
        client.meta.events.register_first("needs-retry.s3", end)


def tag_of(answer: dict) -> str:
    return answer["ETag"].strip('"')
