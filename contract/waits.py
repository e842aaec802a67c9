"""Limits on waits for servers, with a line on stderr after some seconds that names the server and the limit.

    within(60, call, "s3://bucket at http://host:9000", "then the request is sent again")
    limited(client, 60, "MLflow at http://host:5000", "then this command ends")     the same for each of its methods

Libraries limit only the time between two bytes, which a server that sends single bytes never exceeds. A call therefore
runs in a thread that is abandoned at the limit.
"""

import contextvars
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from contract.faults import Fault

NOTICE = 3.0  # seconds until the first line
AGAIN = 30.0  # seconds between two lines about one server, for all threads together

_noticed: dict[str, float] = {}


def within[T](seconds: float, call: Callable[[], T], who: str, then: str) -> T:
    """Return the result of the call. Raise TimeoutError at the limit."""
    outcome: list[tuple[bool, Any]] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.append((True, context.run(call)))
        except BaseException as error:  # raised in the waiting thread
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name=f"wait for {who}")
    thread.start()
    thread.join(min(NOTICE, seconds))
    if not outcome and seconds > NOTICE:
        _report(seconds, who, then)
        thread.join(seconds - NOTICE)
    if not outcome:
        raise TimeoutError(f"{who} has not answered for {seconds:.0f} s")
    succeeded, result = outcome[0]
    if succeeded:
        return result
    raise result


def limited(server: Any, seconds: float, who: str, then: str) -> Any:
    """Return the object with a time limit on each of its methods."""
    return _Limited(server, seconds, who, then)


class _Limited:
    """An object with time limits on its methods. A call that exceeds its limit is a Fault."""

    def __init__(self, server: Any, *limits: Any):
        self._server, self._limits = server, limits

    def __getattr__(self, name: str) -> Any:
        method, (seconds, who, then) = getattr(self._server, name), self._limits

        def call(*args: Any, **keys: Any) -> Any:
            try:
                return within(seconds, functools.partial(method, *args, **keys), who, then)
            except TimeoutError as error:
                raise Fault(f"{error}; check whether it runs, and try again") from None

        return call


def _report(seconds: float, who: str, then: str) -> None:
    now = time.monotonic()
    if now - _noticed.get(who, -AGAIN) < AGAIN:
        return
    _noticed[who] = now
    since, until = (time.strftime("%H:%M:%S", time.localtime(time.time() + s)) for s in (-NOTICE, seconds - NOTICE))
    print(f"waiting for {who}, without an answer since {since}, until {until}; {then}", file=sys.stderr, flush=True)
