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
