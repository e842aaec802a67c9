"""Start the temporary server of a flow that has no standing one, out of the reach of Ctrl-C.

A terminal sends SIGINT to every process of a command. A flow whose server is gone cannot say how it ended, and tries
for minutes. Prefect starts the server without a process group of its own; what it inherits is the mask of the thread.
"""

import signal
import threading
from concurrent.futures import Future

from contract.faults import Fault

WAITS = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


def start() -> None:
    """Start it, where PREFECT_API_URL names no server. A Fault where this host is too busy for it."""
    from prefect.settings import get_current_settings

    if get_current_settings().api.url:
        return
    from prefect.server.api.server import SubprocessASGIServer  # seconds of imports, which other flows do without

    started: Future[None] = Future()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started.set_result(SubprocessASGIServer().start())
        except RuntimeError as error:  # it has not answered in time, or has ended
            line = (str(error).splitlines() or [""])[0].rstrip(".")
            started.set_exception(Fault(f"Prefect: {line}; on a busy host {WAITS}=600 (seconds) waits longer"))
        except Exception as error:
            started.set_exception(error)

    threading.Thread(target=begin, daemon=True).start()  # Ctrl-C reaches this thread meanwhile
    started.result()
