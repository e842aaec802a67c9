"""Messages between the trainer and vLLM's process, over a socket pair that no other process can reach."""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: Any) -> None:
    """Send an object that Connection.recv() returns on the other side.

    Connection.send() pickles into a BytesIO and sends a view of it. If the other side has ended, that view stays in the
    frames of the error. CPython 3.12.1 dies with SIGSEGV when its garbage collector meets such a view, for example at
    the end of a command that has reported the error.
    """
    connection.send_bytes(pickle.dumps(message))
