"""Keep a server running: start it under a guard, check its health, and restart it after crashes.

event                                      action
never answers                              Broken, with its last lines: the next start would fail too
user error (exit code 2)                   Fault
crashes, or stops answering                restart after WAITS, each longer; after the last one, Broken
answers for STEADY seconds                 the count of crashes is reset
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from contract.faults import Fault, Stopped
from contract.served_model import KEY, ServedModel
from tasks.run import launch
from tasks.run.launch import Broken, Turn
from tasks.servers.prefect_server import answers

WAITS = (1.0, 5.0, 25.0, 60.0, 120.0)  # seconds before each new start
STEADY = 1800.0
LOOKED = 30.0  # seconds between health checks of a server that answers
ANSWERS_WITHIN = 10.0
SILENT_AFTER = 3  # health checks in a row without an answer
LEAVES_WITHIN = 15  # seconds; unfinished answers have 10 of them (trainer/serving/api_server.py)
COMMAND = "trainer.serve"
FILE, LOG = "model.json", "server.log"


def url(served: ServedModel) -> str:
    """Return the address at which this host reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(served.host, served.host)
    return f"http://[{host}]:{served.port}" if ":" in host else f"http://{host}:{served.port}"


def require_free(host: str, port: int) -> None:
    """Raise a Fault for an address that is in use or invalid."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise Fault(f"{host} port {port}: {error.strerror}; choose another with --port") from None


@dataclass
class Watch:
    """Health checks of one start of a server: twice a second until it answers, then every LOOKED seconds."""

    url: str
    answered: Callable[[float], None]  # called at the first answer, with the seconds since the start
    began: float = field(default_factory=time.monotonic)
    first: float | None = None  # time of the first answer
    looked: float = 0.0
    missed: int = 0

    def look(self) -> None:
        now = time.monotonic()
        if self.first is not None and now - self.looked < LOOKED:
            return
        self.looked = now
        healthy = answers(f"{self.url}/health", ANSWERS_WITHIN if self.first else 1.0)
        if healthy and self.first is None:
            self.first = now
            self.answered(now - self.began)
        self.missed = 0 if healthy or self.first is None else self.missed + 1

    def is_steady(self) -> bool:
        return self.first is not None and time.monotonic() - self.first > STEADY


def keep(
    served: ServedModel,
    folder: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    answered: Callable[[float], None],
    turn: Turn | None = None,
) -> None:
    """Serve until stop(). The output is in the folder; say() gets the server's own lines without vLLM's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    served.write(folder / FILE)
    crashes = 0
    while not stop():
        watch = Watch(url(served), answered)
        why = _once(folder, say, stop, watch, turn)
        if stop():
            return
        if watch.first is None or (crashes == len(WAITS) and not watch.is_steady()):
            raise Broken(why)
        crashes = 1 if watch.is_steady() else crashes + 1
        say(f"{why.splitlines()[0]}; its output is in {folder / LOG}; start {crashes} of {len(WAITS)} in a row follows")
        until = time.monotonic() + WAITS[crashes - 1]
        while time.monotonic() < until and not stop():
            time.sleep(launch.TICK)


def _once(folder: Path, say: Callable[[str], None], stop: Callable[[], bool], watch: Watch, turn: Turn | None) -> str:
    """Run the server to its end, and return the reason why it ended."""

    def filtered(line: str) -> None:
        if line.startswith("serve: "):  # all other lines are vLLM's
            say(line.removeprefix("serve: "))

    try:
        launch.process(
            [COMMAND, str(folder / FILE)],
            folder / LOG,
            filtered,
            lambda: stop() or watch.missed >= SILENT_AFTER,
            watch.look,
            keep=[KEY],
            turn=turn,
            grace=LEAVES_WITHIN,
        )
    except Stopped:
        return f"the server has not answered {SILENT_AFTER} times in a row"
    except Broken as broken:
        return str(broken)
    return "the server has ended with code 0"
