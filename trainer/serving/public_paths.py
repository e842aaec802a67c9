"""Paths of vLLM's server that callers reach; any other is answered 404.

vLLM's key guards what begins with /v1. Other paths answer questions without it (/invocations, /generative_scoring,
/tokenize), or change the server (/scale_elastic_ep).
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/metrics")
GUARDED = "/v1/"


class PublicPaths:
    """An ASGI middleware, which vLLM's --middleware names."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN or scope["path"].startswith(GUARDED):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1000})
