"""Process of a Prefect server, which ends soon after its last user. tasks/servers/prefect_server.py starts it.

    python -m tasks.servers.prefect_process LOCK SOCKET USERS LIST

LOCK and SOCKET are file descriptors: the lock of the database, which ends with this process, and the listening socket.
USERS is the file on which each user holds a shared lock. LIST is the file of `make up`: a server in it keeps running.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.settings import get_current_settings
from sqlalchemy.ext.asyncio import AsyncSession

from contract import json_object
from contract.ownership import try_lock, unlock
from contract.processes import started

LOOKS = 0.5  # seconds between checks of its users
ENDS_WITHIN = 10.0  # seconds, after which open connections are cut


def main(lock: str, listening: str, users: str, listed: str) -> None:
    for number in (lock, listening):
        os.set_inheritable(int(number), False)
    _take_turns()
    settings = get_current_settings().server
    config = uvicorn.Config(
        create_app(final=True),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        timeout_graceful_shutdown=int(ENDS_WITHIN / 2),
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_end_unused, args=(server, Path(users), Path(listed)), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=int(listening))])


def _take_turns() -> None:
    """Begin each transaction on SQLite with the write lock; others wait for it, up to 60 s.

    By default a transaction begins without it. SQLite refuses its first write at once, as a deadlock, if another
    transaction has written since its first read: of 96 runs created by 12 clients at a time, Prefect 3.8.8 refused 89
    with code 503.
    """
    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False):
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction


def _end_unused(server: uvicorn.Server, users: Path, listed: Path) -> None:
    """End this process when no process holds a lock on `users`, unless `make up` lists it.

    This process holds the lock until its end: a new command waits for the end, and starts a new server.
    """
    file, me = os.open(users, os.O_RDWR), {"pid": os.getpid(), "started": started(os.getpid())}
    while _lists(listed, me) or not try_lock(file) or _lists(listed, me):
        unlock(file)
        time.sleep(LOOKS)
    server.should_exit = True
    time.sleep(ENDS_WITHIN)
    os._exit(0)


def _lists(listed: Path, me: dict) -> bool:
    server = json_object.read_or_empty(listed).get("prefect")
    return isinstance(server, dict) and me.items() <= server.items()


if __name__ == "__main__":
    main(*sys.argv[1:])
