"""A server in a thread of the test, around an engine that the test can look into."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.config import ServerConfig
from slipstream.engine.engine import Engine
from slipstream.server.run import HttpServer, bind
from tests.server.process import PATIENCE_S

MODEL = "fake"


@dataclass(frozen=True)
class Answered:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        """The body's JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; it has ended with the mark."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        assert lines
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Inside:
    """A running server."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        sock = bind(config)
        self.port = sock.getsockname()[1]
        self.server = HttpServer(engine, sock, config, MODEL)
        is_ready = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=[is_ready.set])
        self.thread.start()
        assert is_ready.wait(PATIENCE_S)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answered:
        """Send one request on a connection of its own; a body that is not bytes is sent as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Content-Type": "application/json"} if raw is not None else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, raw, own | (headers or {}))
            reply = connection.getresponse()
            return Answered(reply.status, dict(reply.getheaders()), reply.read())

    def complete(self, **fields: Any) -> Answered:
        """Ask for a text completion."""
        return self.ask("POST", "/v1/completions", {"prompt": "abc"} | fields)

    def chat(self, **fields: Any) -> Answered:
        """Ask for a chat completion."""
        turns = [{"role": "user", "content": "hi"}]
        return self.ask("POST", "/v1/chat/completions", {"messages": turns} | fields)

    def connect(self) -> socket.socket:
        """Return a raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def send(self, **fields: Any) -> socket.socket:
        """Return a connection on which a text completion was asked for."""
        sock = self.connect()
        sock.sendall(request_bytes({"prompt": "abc"} | fields))
        return sock

    def health(self) -> Any:
        """Return what /health says."""
        return self.ask("GET", "/health").value

    def stop(self) -> None:
        """Stop at once and wait for the end."""
        self.server.stop()
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def request_bytes(body: Any, path: str = "/v1/completions") -> bytes:
    """Return a request as it goes over the wire."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@contextlib.contextmanager
def inside(engine: Engine, **settings: Any) -> Iterator[Inside]:
    """Serve an engine while the block runs."""
    server = Inside(engine, ServerConfig(port=0, **settings))
    try:
        yield server
    finally:
        server.stop()
