"""The server's life: a socket, a loop, signals, and an end that loses nothing.

The socket is bound before the model is loaded, so that a port in use is known at once, and listens
after it. The first SIGINT or SIGTERM stops new requests and lets running ones finish for a while;
then they end with an error event. The second ends them at once. What was learned is kept after
loading, once a minute and at the end, so a server that is killed starts from a profile again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from slipstream.config import ServerConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.server.app import Service, make_app
from slipstream.server.bridge import Bridge, stopping
from slipstream.server.connection import Connection
from slipstream.server.metrics import Metrics

SAVE_EVERY_S = 60.0  # a save takes some milliseconds, between two steps
BACKLOG = 1024  # connections that the system holds until they are accepted
END_S = 5  # for clients to take the last bytes, once streams have ended

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound but does not listen yet.

    Raises:
        ConfigError: the address cannot be had.
    """
    where = f"{config.host} port {config.port}"
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}",
            hint="--host must be an address of this machine"
            if error.errno == errno.EADDRNOTAVAIL
            else "choose another --port, or 0 for a free one",
        ) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """Return a bound socket's URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves an engine from a bound socket; the engine is closed at the end.

    Args:
        model: what requests call it.
    """

    def __init__(
        self, engine: Engine, sock: socket.socket, config: ServerConfig, model: str
    ) -> None:
        self._engine = engine
        self._sock = sock
        self._config = config
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal, or `stop`, ends it.

        Args:
            ready: called once requests are accepted.
        """
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(self._serve(ready))

    def stop(self) -> None:
        """End gracefully, or at once the second time. Any thread may call this while it serves."""
        if self._loop is not None and self._server is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._server.stop)

    async def _serve(self, ready: Callable[[], None]) -> None:
        engine, config = self._engine, self._config
        metrics = Metrics(engine)
        max_open = engine.config.max_num_seqs + config.max_queue
        bridge = Bridge(engine, metrics, max_open=max_open)
        service = Service(
            engine=engine, bridge=bridge, metrics=metrics, config=config, model=self._model
        )
        settings = uvicorn.Config(
            make_app(service),
            http=Connection,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=config.receive_timeout,
            timeout_graceful_shutdown=config.shutdown_timeout + END_S,
        )
        self._server = _Server(settings, bridge, config.shutdown_timeout, ready)
        self._loop = asyncio.get_running_loop()
        keeper = asyncio.create_task(_keep(bridge))
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            keeper.cancel()
            bridge.close()


async def _keep(bridge: Bridge) -> None:
    """Save the profile now, and from time to time if there was anything to learn."""
    steps = -1
    while True:
        if bridge.threaded.engine.stats.steps != steps:
            steps = bridge.threaded.engine.stats.steps
            bridge.threaded.save()
        await asyncio.sleep(SAVE_EVERY_S)


class _Server(uvicorn.Server):
    """Stops in two stages."""

    def __init__(
        self, config: uvicorn.Config, bridge: Bridge, grace_s: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._bridge = bridge
        self._grace_s = grace_s
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals while serving; none is raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def take(_: int, __: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """End gracefully at first, then at once."""
        if self.should_exit:
            self._bridge.end_all(stopping())
            self.force_exit = True
            return
        self.should_exit = True
        self._bridge.drain()
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace_s, self._bridge.end_all, stopping())
