"""One client's connection: uvicorn's, with bounds on what comes before a request's body.

A client that connects and says nothing, sends a head byte by byte or without end, would else hold a
connection, or memory, for ever. Bodies have bounds of their own (`gate`).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # other servers take 8 to 64 KiB


class Connection(HttpToolsProtocol):
    """Ends itself when a request's head is too long or too slow; uvicorn makes it."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and count what belongs to a head."""
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of a request is too long.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._timer is None:  # a further one
            self._expect_head()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._cancel_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
