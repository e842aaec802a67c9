"""Start the temporary server of a flow that has no standing one, out of the reach of Ctrl-C.

A terminal sends SIGINT to every process of a command. A flow whose server is gone cannot say how it ended, and tries
for minutes. Prefect starts the server without a process group of its own; what it inherits is the mask of the thread.
"""

import os
import signal
import threading
from concurrent.futures import Future

from contract.faults import Fault

WAITS = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
# Levels of the server's loggers. When it ends with a query under way, Prefect's recorder and SQLAlchemy print stack
# traces behind the last line of an interrupted run. What fails while it lives is answered to the flow.
LEVELS = {"PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL", "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL"}


def require_answer() -> None:
    """Raise a Fault where PREFECT_API_URL names a server that is not there, or that this Prefect cannot talk to."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        return
    try:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch_once()  # the flow asks the same, and does not ask again
    except (RuntimeError, httpx.HTTPError) as error:
        line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise Fault(
            f"PREFECT_API_URL: {line}; unset it for a server of this run's own, or make up starts one"
        ) from None


def start() -> None:
    """Start it, where PREFECT_API_URL names no server. A Fault where this host is too busy for it."""
    from prefect.settings import get_current_settings

    if get_current_settings().api.url:
        return
    from prefect.server.api.server import SubprocessASGIServer  # seconds of imports, which other flows do without

    started: Future[None] = Future()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        added = {name: level for name, level in LEVELS.items() if name not in os.environ}
        os.environ.update(added)
        try:
            started.set_result(SubprocessASGIServer().start())
        except RuntimeError as error:  # it has not answered in time, or has ended
            line = (str(error).splitlines() or [""])[0].rstrip(".")
            started.set_exception(Fault(f"Prefect: {line}; on a busy host {WAITS}=600 (seconds) waits longer"))
        except Exception as error:
            started.set_exception(error)
        finally:
            for name in added:
                del os.environ[name]

    threading.Thread(target=begin, daemon=True).start()  # Ctrl-C reaches this thread meanwhile
    started.result()
