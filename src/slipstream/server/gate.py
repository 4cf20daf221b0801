"""What every request passes before a route sees it: the key, and the limits of its body.

HEAD is served wherever GET is, as HTTP has it.

Plain ASGI, so that a response's chunks pass through untouched.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.config import ServerConfig
from slipstream.server.failures import HttpFailure, error_body, headers_of, status_of
from slipstream.server.metrics import Metrics

# What needs no key: whether the server lives, what it is, and a page without data of its own.
OPEN_PATHS = frozenset({"/", "/health", "/version"})


class Gate:
    """Lets through what may go on.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._key = config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET; uvicorn keeps the body back, by its own scope
            scope = {**scope, "method": "GET"}
        counts = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        if counts:
            self._metrics.received()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.rejected(message["status"])
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers)
            limited = self._limited(headers, receive)
            # Events of a stream go straight to the server: they are many, and the first is 200.
            await self._app(scope, limited, counted if counts else send)
        except HttpFailure as failure:
            await _refuse(counted if counts else send, failure)

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if not self._key or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise HttpFailure(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                hint="send the header 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        """Return a `receive` that bounds a body's length and the time it takes to come."""
        left = self._config.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > left:
            raise self._too_long()
        is_whole = False
        end_s = asyncio.get_running_loop().time() + self._config.receive_timeout

        async def limited() -> Message:
            nonlocal left, is_whole
            if is_whole:  # what follows is a disconnect, and may take as long as the response
                return await receive()
            try:
                async with asyncio.timeout_at(end_s):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            left -= len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if left < 0:
                raise self._too_long()
            return message

        return limited

    def _too_long(self) -> HttpFailure:
        return HttpFailure(
            413,
            f"a body may have at most {self._config.max_body_bytes} bytes",
            code="body_too_long",
            headers={"connection": "close"},
        )

    def _too_slow(self) -> HttpFailure:
        return HttpFailure(
            408,
            f"a request must arrive within {self._config.receive_timeout} s",
            code="receive_timeout",
            headers={"connection": "close"},
        )


async def _refuse(send: Send, failure: HttpFailure) -> None:
    body = error_body(failure)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(k.encode(), v.encode()) for k, v in (headers | headers_of(failure)).items()]
    await send({"type": "http.response.start", "status": status_of(failure), "headers": raw})
    await send({"type": "http.response.body", "body": body})
