"""One client's connection: uvicorn's, with bounds on a request's head and on unread replies.

A client that connects and says nothing, sends a head byte by byte or without end, or leaves its
reply unread, would else hold a connection, memory or its request's place for ever. Bodies have
bounds of their own (`gate`).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # other servers take 8 to 64 KiB


class Connection(HttpToolsProtocol):
    """Ends itself when a head is too long or too slow, or nobody reads; uvicorn makes it."""

    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._cancel_timer()
        self._cancel_unread_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client leaves much unread: it has some time to go on."""
        super().pause_writing()
        self._cancel_unread_timer()
        # Not `close`, which waits until everything is read.
        self._unread_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read on."""
        self._cancel_unread_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take what came, and count what belongs to a head."""
        head = self._timer
        super().data_received(data)
        if self._timer is not None and self._timer is head:  # else a body may be in it as well
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

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
