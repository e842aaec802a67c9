"""Messages between the trainer and vLLM's process, over a socket pair that nobody else can reach."""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: Any) -> None:
    """Send what Connection.recv() returns on the other side.

    Connection.send() pickles into a BytesIO and sends a view of it. If the other side is gone, that view stays in the
    frames of the error. CPython 3.12.1 dies with SIGSEGV where its garbage collector finds such a view, as it does at
    the end of a command that has told the error in one line.
    """
    connection.send_bytes(pickle.dumps(message))
