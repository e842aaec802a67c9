"""Paths of vLLM's server that callers can reach; every other path gets status 404.

vLLM requires its key only for paths that begin with /v1. Other paths answer questions without the key (/invocations,
/generative_scoring, /tokenize) or change the server (/scale_elastic_ep).
"""

from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health", "/metrics")
GUARDED = "/v1/"


class PublicPaths:
    """ASGI middleware for vLLM's option --middleware."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN or scope["path"].startswith(GUARDED):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1000})
