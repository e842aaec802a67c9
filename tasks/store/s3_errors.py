"""Errors of S3 and boto3, rewritten to one line.

The original texts may contain the id of a key or an address with a password, so the line has only codes and the names
of exceptions and operations. s3_errors.yaml has the messages.
"""

import contextlib
import functools
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import yaml

from contract.faults import Fault
from contract.waits import within


class Named(Protocol):
    """An S3: its address without secrets, and boto3's client for it."""

    @property
    def uri(self) -> str: ...
    @property
    def client(self) -> Any: ...


ATTEMPTS = 8
ATTEMPTS_SET = ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE")  # in the environment of the command
SILENT = 120  # seconds after which a request without an answer is not repeated
BLOCK_WITHIN = 60.0  # seconds that a block of an object may take
SLOW = 3  # a block that takes longer counts as this many further broken connections
REFUSED = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"}
ABSENT = {"NoSuchKey", "404"}
MESSAGES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("s3_errors.yaml").read_text("utf-8"))


@functools.cache
def broken() -> tuple[type[Exception], ...]:
    """Exceptions of a connection that breaks during a transfer; botocore repeats requests only before it."""
    from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
    from urllib3.exceptions import HTTPError

    return IncompleteReadError, ReadTimeoutError, ResponseStreamingError, HTTPError, TimeoutError


def read(store: Named, body: Any, length: int | None = None) -> bytes:
    """Read `length` bytes of an answer's content, or all of it if the object is small."""
    who = f"{store.uri} at {address(store.client)}"
    then = "then the rest of the object is requested again"
    return within(BLOCK_WITHIN, functools.partial(body.read, length), who, then)


class Refused(Fault):
    """The store declined a request because of its condition, or because the object does not exist."""

    code = ""
    retried = False


def lost(uri: str) -> Fault:
    return Fault(f"{uri}: the connection broke {ATTEMPTS} times in a row; start again when the network works")


def code_of(error: BaseException) -> str:
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def pause(attempt: int) -> None:
    time.sleep(min(0.1 * 2**attempt, 10) * (0.5 + secrets.randbelow(1000) / 1000))


@contextlib.contextmanager
def plainly(store: Named, stage: str = "") -> Iterator[None]:
    """Turn botocore's exceptions into Faults of one line without secrets."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError) as error:
        _explain(store, error, stage)
    except ValueError as error:  # for example an invalid name of a bucket or an endpoint
        if isinstance(error, Fault) or not stage:
            raise
        raise Fault(f"{store.uri}: no S3 client; AWS_ENDPOINT_URL or the region is not valid") from None


def _explain(store: Named, error: Exception, stage: str) -> NoReturn:
    kind, code = type(error).__name__, code_of(error)
    operation = getattr(error, "operation_name", "")
    if code in REFUSED:
        refused = Refused(f"{store.uri}: {operation}: {code}; the object is missing or has changed")
        refused.code = code
        refused.retried = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0  # type: ignore
        raise refused from None
    name, messages = code or (f"client {kind}" if stage else kind), MESSAGES["codes" if code else "exceptions"]
    text = next(text for expression, text in messages.items() if re.fullmatch(expression, name))
    where = "" if stage else address(store.client)
    raise Fault(f"{store.uri}: {text.format(code=code, kind=kind, operation=operation, address=where)}") from None


def address(client: Any) -> str:
    """Address of a client's S3, without credentials."""
    parts = urlsplit(client.meta.endpoint_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
