"""One request's response: it waits for chunks, writes them, and notices when its client is gone.

The first chunk decides the status, so whatever goes wrong before it, a full queue as well as a row
without a token, is answered with a status and an error object. After that an error is an event of
its own, followed by the usual mark, so that a stream always has an end.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import RequestError, SlipstreamError
from slipstream.server.ask import Ask
from slipstream.server.bridge import Bridge, Stream
from slipstream.server.failures import HttpFailure, error_body, headers_of, status_of
from slipstream.server.form import DONE, Form, error_event
from slipstream.types import Chunk

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


class Answer(Response):
    """Has a request checked, and answers from what the engine makes of it.

    Args:
        form: writes the chunks.
        timeout_s: when the request is given up, checks included.
    """

    def __init__(self, bridge: Bridge, ask: Ask, form: Form, *, timeout_s: float) -> None:
        super().__init__()
        self._bridge = bridge
        self._ask = ask
        self._form = form
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, unless the client goes away."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        is_gone = False

        def leave(_: asyncio.Task[None]) -> None:
            nonlocal is_gone
            if not watch.cancelled():
                is_gone = True
                task.cancel()

        end_s = loop.time() + self._timeout_s
        watch = loop.create_task(_until_gone(receive))
        watch.add_done_callback(leave)
        try:
            await self._send(send, end_s)
        except asyncio.CancelledError:
            if not is_gone or task.uncancel():
                raise
        finally:
            watch.cancel()

    async def _send(self, send: Send, end_s: float) -> None:
        late = HttpFailure(
            504, f"a request may take at most {self._timeout_s:g} s here", code="request_timeout"
        )
        try:
            stream = await self._opened(end_s, late)
        except SlipstreamError as error:
            await _send_failure(send, error)
            return
        timer = asyncio.get_running_loop().call_at(end_s, stream.fail, late)
        try:
            if self._ask.is_streamed:
                await self._send_events(stream, send)
            else:
                await self._send_whole(stream, send)
        finally:
            timer.cancel()
            stream.close()

    async def _opened(self, end_s: float, late: HttpFailure) -> Stream:
        ask = self._ask
        try:
            async with asyncio.timeout_at(end_s):
                return await self._bridge.open(ask.prompts, ask.params, is_streamed=ask.is_streamed)
        except TimeoutError:
            raise late from None
        except RequestError as error:
            raise ask.renamed(error) from None

    async def _send_whole(self, stream: Stream, send: Send) -> None:
        arrived: list[tuple[int, Chunk]] = []
        try:
            while stream.left:
                arrived += await stream.take()
        except SlipstreamError as error:
            await _send_failure(send, error)
            return
        body = self._form.whole(arrived)
        await _start(send, 200, JSON, {"content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, stream: Stream, send: Send) -> None:
        form = self._form
        is_started = False
        try:
            while True:
                body = form.events(await stream.take())
                is_last = not stream.left
                if is_last:
                    body += form.end()
                if not is_started:
                    is_started = True
                    await _start(send, 200, EVENTS, {"cache-control": "no-store"})
                if body:
                    await send(
                        {"type": "http.response.body", "body": body, "more_body": not is_last}
                    )
                if is_last:
                    return
        except SlipstreamError as error:
            if not is_started:
                await _send_failure(send, error)
                return
            body = error_event(error_body(error)) + DONE
            await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_failure(send: Send, error: SlipstreamError) -> None:
    body = error_body(error)
    headers = headers_of(error) | {"content-length": str(len(body))}
    await _start(send, status_of(error), JSON, headers)
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, media_type: str, headers: dict[str, str]) -> None:
    raw = [(b"content-type", media_type.encode())]
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
