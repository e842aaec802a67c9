"""Errors of S3 and boto3, rewritten to one line.

The original texts may contain the id of a key or an address with a password, so the line has only codes and the names
of exceptions and operations.
"""

import contextlib
import functools
import secrets
import time
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

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
CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
    "InvalidClientTokenId",
}


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
    if code == "NoSuchBucket":
        text = "no such bucket; create it, or name another"
    elif code in CREDENTIALS:
        text = f"the credentials are not valid ({code}); renew AWS_ACCESS_KEY_ID and its secret, or choose AWS_PROFILE"
    elif code in ("AccessDenied", "403", "AllAccessDisabled"):
        text = f"{operation} is denied ({code}); allow these credentials to list, get, put and delete"
    elif code in ("NotImplemented", "501"):
        text = f"this S3 does not support {operation} (conditional writes, multipart); use another one or a folder"
    elif code:
        text = f"the store answered {code} to {operation}; try again, or ask its operator"
    elif kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        text = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or give the host a role"
    elif "Token" in kind or "SSO" in kind or kind in ("ProfileNotFound", "UnauthorizedSSOTokenError"):
        text = f"no credentials from this profile ({kind}); log in again or choose another AWS_PROFILE"
    elif kind in ("ParamValidationError", "InvalidEndpointConfigurationError", "NoRegionError") or stage:
        text = f"S3 would not accept the request ({kind}); check the bucket's name, the region and AWS_ENDPOINT_URL"
    else:
        advice = "check AWS_ENDPOINT_URL and the network, then start again"
        text = f"{address(store.client)} does not answer ({kind}); {advice}"
    raise Fault(f"{store.uri}: {text}") from None


def address(client: Any) -> str:
    """Address of a client's S3, without credentials."""
    parts = urlsplit(client.meta.endpoint_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
