"""Client of the Hub over HTTP: the files of a revision, and the content of one file, resumed and verified.

    describe("zai-org/GLM-4.7", "main")     commit, sizes and digests of all files, with one call of the API
    receive(url, part, size, digest, ...)   one file; continues after an earlier attempt or process

huggingface_hub 1.33 gives a partial file a random name and deletes it on failure. An interrupted shard of 5 GB would
start again, and a partial file would be useless after SIGKILL. This module therefore requests the bytes itself, with
that library's session, headers and errors, and writes them into a partial file with a fixed name. That is plain HTTP
without Xet. Files above 50 GB, which the Hub serves only with Xet, are fetched by hf_hub_download (tasks/sources/hub/).

HF_ENDPOINT, HF_TOKEN (or the file that `hf auth login` writes) and HF_HUB_OFFLINE are read at each call. No error
message contains the token.
"""

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from difflib import get_close_matches
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import yaml

from contract.faults import Fault
from contract.waits import within
from tasks.sources.hub.digests import Partial, complete

WAITS = (0.5, 1, 2, 4, 8, 16)  # seconds before each further attempt; after progress the first one applies again
LONGEST_WAIT = 330  # the Hub counts requests over windows of 300 s
ANSWERS_WITHIN = 30.0  # seconds for a complete answer of the API, or for the first bytes of a file
SLOWEST = 1000  # bytes a second, over ANSWERS_WITHIN
REFUSALS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text("utf-8"))
PASSING = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}


class NotThere(Fault):
    """The Hub has no such model, or hides it."""


class Unreachable(Fault):
    """The Hub cannot be reached from this host, or HF_HUB_OFFLINE is set."""


def endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def keep_addresses_out_of_logs() -> None:
    """Silence httpx, which logs each address at INFO: the Hub redirects to signed addresses that grant access."""
    for name in ("httpx", "httpcore"):
        if logging.getLogger(name).getEffectiveLevel() < logging.WARNING:
            logging.getLogger(name).setLevel(logging.WARNING)


def describe(name: str, revision: str) -> tuple[str, dict[str, int], dict[str, str]]:
    """The current commit of a branch, tag or commit, and the size and digest of each of its files."""
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    require_online(name)
    _require_clean_token()
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    api = HfApi(endpoint=endpoint())
    try:
        info = patiently(lambda: api.model_info(name, revision=revision, files_metadata=True, timeout=seconds))
        siblings = info.siblings or []
        if info.sha is None or any(file.size is None or not (file.lfs or file.blob_id) for file in siblings):
            raise KeyError("sha, sizes and digests")
        files = {file.rfilename: file.size or 0 for file in siblings}
        digests = {f.rfilename: f"sha256:{f.lfs.sha256}" if f.lfs else f"git:{f.blob_id}" for f in siblings}
        if info.gated and files:  # the description of a gated model is public; its files are not
            url = hf_hub_url(name, min(files, key=files.__getitem__), revision=info.sha, endpoint=endpoint())
            patiently(lambda: get_hf_file_metadata(url, timeout=seconds, endpoint=endpoint()))
    except HFValidationError:
        raise Fault(f"{name}: neither an existing folder nor a model of the Hub, which has the form org/name") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise _no_hub(name) from None
    except Exception as error:
        raise fault(error, name, revision) from None
    return info.sha, files, digests


def receive(url: str, part: Path, size: int, digest: str, count: Callable, stopped: Event) -> None:
    """Complete `part` with the file at the url. Its bytes are kept if the server supports ranges."""
    if not complete(part, digest, size, count, stopped, lambda partial: _receive_rest(url, partial)):
        raise Fault(f"{_shown(url)}: twice the content differed from its commit; try later")


def fault(error: Exception, name: str, revision: str) -> Exception:
    """Fault with advice for a known error; any other error itself."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    hub = _shown(endpoint())
    if isinstance(error, HfHubHTTPError):
        return _refusal(error.response, name, revision, hub)
    if isinstance(error, OfflineModeIsEnabled):
        return _offline(name)
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return Fault(f"HF_ENDPOINT={hub}: not a URL; it looks like https://huggingface.co")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unreachable(f"{name}: {hub} cannot be reached ({error}): check the network, the proxy and HF_ENDPOINT")
    if isinstance(error, httpx.TransportError):
        kind = type(error).__name__
        return Fault(f"{name}: the connection to {hub} broke repeatedly ({kind}); start again: it will resume")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fault(f"{name}: the disk is full ({error.filename or 'while writing'}); free some space and start again")
    if isinstance(error, httpx.RequestError):  # such as endless redirects
        return _no_hub(name)
    return error


def _receive_rest(url: str, partial: Partial) -> None:
    import httpx
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    attempt = 0
    while partial.done < partial.size:
        before, mark = partial.done, (time.monotonic(), partial.done)
        # gzip excludes Range; the token is read at each attempt, and is not sent to other hosts
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={partial.done}-"} if partial.done else {}
        try:
            with contextlib.ExitStack() as stack:
                seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
                stream = get_session().stream("GET", url, headers=headers, timeout=seconds)
                answer = _answer(lambda stream=stream: stack.enter_context(stream))
                hf_raise_for_status(answer)
                if partial.done and answer.status_code != 206:  # the server ignores the range and sends the whole file
                    partial.restart()
                for chunk in answer.iter_bytes():  # 64 KiB each: a broken connection loses none of them
                    partial.write(chunk)
                    if partial.done > partial.size:
                        return
                    if time.monotonic() - mark[0] > ANSWERS_WITHIN:
                        if partial.done - mark[1] < SLOWEST * ANSWERS_WITHIN:
                            before = partial.done  # too slow counts as no progress
                            raise httpx.ReadTimeout(f"slower than {SLOWEST} bytes a second")
                        mark = time.monotonic(), partial.done
            if partial.done < partial.size:
                raise httpx.RemoteProtocolError("ended early")
        except Exception as error:
            attempt = 0 if partial.done > before else attempt
            seconds = _pause(error, attempt)
            if seconds is None:
                raise
            attempt += 1
            if partial.stopped.wait(seconds):
                raise CancelledError from None
    partial.file.flush()
    os.fsync(partial.file.fileno())


def patiently[T](call: Callable[[], T]) -> T:
    """Call the Hub, and repeat the call a few times during an outage."""
    attempt = 0
    while True:
        try:
            return _answer(call)
        except Exception as error:
            seconds = _pause(error, attempt) if attempt < 4 else None
            if seconds is None:
                raise
        attempt += 1
        time.sleep(seconds)


def _answer[T](call: Callable[[], T]) -> T:
    """Call the Hub with a time limit. Raises httpx's exception for a timeout."""
    import httpx

    try:
        return within(
            ANSWERS_WITHIN, call, f"the Hub at {_shown(endpoint())}", "then the request is repeated a few times"
        )
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from None


def _pause(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before another attempt; None if it would fail too."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import parse_ratelimit_headers

    if attempt >= len(WAITS):
        return None
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in PASSING:
            return None
        retry_after = error.response.headers.get("Retry-After", "")
        limit = parse_ratelimit_headers(error.response.headers)
        if retry_after.isdigit():
            return min(max(int(retry_after), WAITS[attempt]), LONGEST_WAIT)
        if error.response.status_code == 429 and limit and limit.remaining == 0:
            return min(limit.reset_in_seconds + 1, LONGEST_WAIT)
        return WAITS[attempt]
    hopeless = httpx.UnsupportedProtocol | httpx.LocalProtocolError
    return WAITS[attempt] if isinstance(error, httpx.TransportError) and not isinstance(error, hopeless) else None


def _refusal(answer, name: str, revision: str, hub: str) -> Fault:
    status, code, token = answer.status_code, answer.headers.get("X-Error-Code"), _token_source()
    messages = next(texts for expression, texts in REFUSALS.items() if re.fullmatch(expression, f"{status} {code}"))
    text = messages.get("any") or messages["token" if token else "none"]
    others = _other_revisions(name, revision) if code == "RevisionNotFound" else ""
    values = {"hub": hub, "page": f"{hub}/{name}", "token": token, "revision": revision, "others": others}
    kind = NotThere if code == "RepoNotFound" or (status == 404 and code is None) else Fault
    return kind(f"{name}: {text.format(status=status, code=code, **values)}")


def _no_hub(name: str) -> Fault:
    return Fault(f"{name}: {_shown(endpoint())} does not answer as the Hub does; check HF_ENDPOINT")


def _other_revisions(name: str, revision: str) -> str:
    from huggingface_hub import HfApi

    try:
        refs = HfApi(endpoint=endpoint()).list_repo_refs(name)
    except Exception:  # the list is only advice
        return ""
    known = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = get_close_matches(revision, known, n=3) or known[:10]
    return f"; it has {', '.join(near)}" if near else ""


def require_online(name: str) -> None:
    from huggingface_hub import constants

    set_now = os.environ.get("HF_HUB_OFFLINE", os.environ.get("TRANSFORMERS_OFFLINE", ""))
    if constants.is_offline_mode() or set_now.upper() in constants.ENV_VARS_TRUE_VALUES:
        raise _offline(name)


def _offline(name: str) -> Fault:
    return Unreachable(
        f"{name}: HF_HUB_OFFLINE is set, so the Hub is not used; unset it, or use a folder as the source"
    )


def _require_clean_token() -> None:
    """Refuse a token with characters that HTTP does not allow, as httpx's error would quote it."""
    from huggingface_hub import get_token

    token = get_token() or ""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise Fault(f"the token in {_token_source()} contains invalid characters; `hf auth login`")


def _token_source() -> str | None:
    from huggingface_hub import constants, get_token

    in_environment = next((key for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(key)), None)
    return in_environment or (constants.HF_TOKEN_PATH if get_token() else None)


def _shown(url: str) -> str:
    """A URL without a user, a password or a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url
