"""Relay between hosts: a port of the first host that leads to its store, for hosts that know a secret.

    admit((address, port), key, store)          on the first host: opens the port
    reach((address, port), key, within)         on another host: returns a local port that leads to the first host's

Each side proves with an HMAC over two fresh nonces that it knows the key, before any byte reaches the store. Bytes that
follow are neither encrypted nor signed. The relay is for a network in which strangers can connect, and not for one in
which they can change packets.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

Address = tuple[str, int]
Streams = tuple[StreamReader, StreamWriter]

NONCE = 32
PROOF = 32  # bytes of an HMAC with SHA-256
ANSWERED = 10.0  # seconds for a proof
BETWEEN = 0.2  # seconds between attempts to reach a host that does not listen yet
BLOCK = 1 << 16
LOOPBACK = "127.0.0.1"


class Stranger(Exception):
    """The other end does not know the key."""


def admit(address: Address, key: bytes, store: int) -> None:
    """Open a port that leads to a port of this host, until this process ends."""

    async def check(reader: StreamReader, writer: StreamWriter) -> Streams:
        async with asyncio.timeout(ANSWERED):
            await _be_host(reader, writer, key)
        return await asyncio.open_connection(LOOPBACK, store)

    _serve(socket.create_server(address, backlog=2048), check)


def reach(address: Address, key: bytes, within: float) -> int:
    """Open a port of this host that leads to the first host's, until this process ends. Returns the port.

    If the first host does not listen yet, try again for `within` seconds.
    """

    async def dial(_reader: StreamReader, _writer: StreamWriter) -> Streams:
        until = time.monotonic() + within
        while True:
            try:
                async with asyncio.timeout(ANSWERED):
                    return await _enter(address, key)
            except (OSError, asyncio.IncompleteReadError):
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(BETWEEN)

    listener = socket.create_server((LOOPBACK, 0), backlog=2048)
    _serve(listener, dial)
    return listener.getsockname()[1]


async def _enter(address: Address, key: bytes) -> Streams:
    reader, writer = await asyncio.open_connection(*address)
    try:
        await _be_guest(reader, writer, key)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _be_host(reader: StreamReader, writer: StreamWriter, key: bytes) -> None:
    guest_nonce, host_nonce = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
    writer.write(host_nonce + _proof(key, b"host", guest_nonce + host_nonce))
    if not hmac.compare_digest(await reader.readexactly(PROOF), _proof(key, b"guest", guest_nonce + host_nonce)):
        raise Stranger


async def _be_guest(reader: StreamReader, writer: StreamWriter, key: bytes) -> None:
    guest_nonce = secrets.token_bytes(NONCE)
    writer.write(guest_nonce)
    host_nonce = await reader.readexactly(NONCE)
    if not hmac.compare_digest(await reader.readexactly(PROOF), _proof(key, b"host", guest_nonce + host_nonce)):
        raise Stranger
    writer.write(_proof(key, b"guest", guest_nonce + host_nonce))


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def _serve(listener: socket.socket, far_end: Callable[[StreamReader, StreamWriter], Awaitable[Streams]]) -> None:
    """Join each connection to the one that far_end() returns for it, in a thread of this process."""

    async def join(reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, Stranger, asyncio.IncompleteReadError), contextlib.closing(writer):
            far_reader, far_writer = await far_end(reader, writer)
            with contextlib.closing(far_writer):
                ways = [asyncio.ensure_future(_copy(*way)) for way in ((reader, far_writer), (far_reader, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()

    async def serve() -> None:
        server = await asyncio.start_server(join, sock=listener)
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True, name="relay").start()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(BLOCK):
            writer.write(block)
            await writer.drain()
