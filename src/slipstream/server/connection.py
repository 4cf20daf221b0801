"""One client's connection: uvicorn's, with bounds on a request's head and on unread replies.

A client that connects and says nothing, sends a head byte by byte or without end, or leaves its
reply unread, would else hold a connection, memory or its request's place for ever. Bodies have
bounds of their own (`gate`). What is no HTTP is answered as everything else is, with an error
object, and a wish for another protocol is passed over: the request is served as it stands.
"""

from __future__ import annotations

import asyncio

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.server.failures import HttpFailure, error_body

MAX_HEAD_BYTES = 1 << 16  # other servers take 8 to 64 KiB


class Connection(HttpToolsProtocol):
    """Ends itself when a head is too long or too slow, or nobody reads; uvicorn makes it."""

    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _head_bytes = 0
    _body_left = 0  # of a request whose body the parser does not see

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
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_unread()

    def on_response_complete(self) -> None:
        """A reply was written; the client has some time for what of it is unread."""
        super().on_response_complete()
        self._watch_unread()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless a reply is being written, which is cut off."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        body = error_body(HttpFailure(400, msg, code="invalid_http"))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self._end()

    def data_received(self, data: bytes) -> None:
        """Take what came, and count what belongs to a head."""
        head = self._timer
        self._feed(data)
        if self._timer is not None and self._timer is head:  # else a body may be in it as well
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(
                    f"the head of a request may have at most {MAX_HEAD_BYTES} bytes"
                )

    def _feed(self, data: bytes) -> None:
        """Parse what came. A body behind a wish for another protocol is taken without the parser.

        It takes such a head for the whole request, and what follows for the other protocol.
        """
        if self._body_left:
            body, data = data[: self._body_left], data[self._body_left :]
            self._body_left -= len(body)
            self.on_body(body)
            if self._body_left:
                return
            self.on_message_complete()
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as wish:
            self._body_left = _length_of(self.headers)
            self.cycle.more_body = self._body_left > 0
            rest = data[wish.args[0] :]
            if rest:
                self._feed(rest)
        except HttpParserError:
            self.send_400_response("the request is no HTTP")

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
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._end)

    def _end(self) -> None:
        """Close the connection, as soon as the client has read what is left or had time to."""
        self.transport.close()
        self._watch_unread()

    def _watch_unread(self) -> None:
        """End the connection unless the client reads on: with little unread, nothing else would."""
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.timeout_keep_alive, self._look_at_unread)

    def _look_at_unread(self) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() >= self._unread_bytes:
            self.transport.abort()
        else:
            self._watch_unread()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _length_of(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length that a head gives for its body."""
    value = dict(headers).get(b"content-length", b"0")
    return int(value) if value.isdigit() and len(value) < 20 else 0
