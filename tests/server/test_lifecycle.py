"""Clients that go, servers that stop, and what is left of it: nothing but what was learned."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ServerConfig
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.server.bridge import NUM_CHECKERS
from slipstream.server.run import address_of, bind
from tests.engine_checks import check_engine
from tests.fake_model import continuation, fake_engine
from tests.server.inside import Inside, inside, request_bytes
from tests.server.process import PATIENCE_S, ServerProcess, eventually, serving

ENDLESS: dict[str, Any] = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose steps take a while, looked at when its server has ended."""
    made = fake_engine(
        drafter=NGramDrafter, max_model_len=4096, after_forward=lambda: time.sleep(0.001)
    )
    yield made
    check_engine(made)
    assert (made.num_requests, made.pages.num_taken) == (0, 0)


def is_idle(server: Inside) -> bool:
    """Tell whether nothing runs, waits or holds a page."""
    health = server.health()
    return health["running_or_waiting"] == health["kv_pages_used"] == 0


def test_a_client_that_goes_is_noticed_streamed_or_not(engine: Engine) -> None:
    with inside(engine) as server:
        for stream in (False, True):
            sock = server.send(stream=stream, **ENDLESS)
            eventually(lambda: engine.pages.num_taken > 0)
            sock.close()
            eventually(lambda: is_idle(server))
        assert engine.stats.cancelled == 2
        assert server.complete(max_tokens=5, temperature=0).status == 200


def test_a_client_that_goes_while_it_waits_is_forgotten(engine: Engine) -> None:
    with inside(engine) as server:
        held = [server.send(stream=True, **ENDLESS) for _ in range(12)]  # 8 run, 4 wait
        eventually(lambda: server.health()["running_or_waiting"] == 12)
        for sock in held[8:]:
            sock.close()
        eventually(lambda: server.health()["running_or_waiting"] == 8)
        for sock in held[:8]:
            sock.close()
        eventually(lambda: is_idle(server))


def test_a_cancel_ends_within_a_round(engine: Engine) -> None:
    with inside(engine) as server:
        sock = server.send(stream=True, **ENDLESS)
        while b"data: " not in sock.recv(1 << 16):
            pass
        sock.close()
        eventually(lambda: engine.num_requests == 0)
        steps = engine.stats.steps
        assert server.complete(max_tokens=1, temperature=0).status == 200
        assert engine.stats.steps == steps + 1  # the prompt of this one and nothing else


def test_a_client_that_never_reads_does_not_hold_up_others(engine: Engine) -> None:
    with inside(engine) as server:
        sock = server.connect()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(request_bytes({"prompt": "abc", "stream": True, "n": 4, **ENDLESS}))
        eventually(lambda: engine.num_requests == 4)
        for _ in range(5):
            answer = server.complete(max_tokens=20, temperature=0)
            assert answer.value["usage"]["completion_tokens"] == 20
        sock.close()
        eventually(lambda: is_idle(server))


def test_a_client_that_leaves_its_reply_unread_gives_its_place_back() -> None:
    engine = fake_engine(max_model_len=4096)
    with inside(engine, receive_timeout=1) as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(request_bytes({"prompt": "abc", "stream": True, "n": 32, **ENDLESS}))
        eventually(lambda: engine.stats.completion_tokens > 32 * 100)
        eventually(lambda: is_idle(server))
        assert server.complete(max_tokens=5, temperature=0).status == 200


def test_a_little_that_is_left_unread_holds_no_connection() -> None:
    engine = fake_engine(max_model_len=4096)
    with inside(engine, receive_timeout=1) as server, server.connect() as sock:
        server.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # What is accepted from now on has little room, so the rest stays with the server.
        with socket.socket() as small:
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            small.connect(("127.0.0.1", server.port))
            small.sendall(request_bytes({"prompt": "abc", **ENDLESS}))
            eventually(lambda: engine.stats.finished == 1)
            assert server.server._server is not None
            state = server.server._server.server_state
            eventually(lambda: not state.connections)  # the idle one goes as well
        sock.settimeout(PATIENCE_S)
        assert sock.recv(1) == b""


def test_two_requests_on_one_connection_are_answered_in_order(engine: Engine) -> None:
    with inside(engine) as server, server.connect() as sock:
        fields = {"temperature": 0, "stream": True}
        first = request_bytes({"prompt": "abc", "max_tokens": 9, **fields})
        second = request_bytes({"prompt": "xyz", "max_tokens": 7, **fields})
        sock.sendall(first + second)
        received = b""
        while received.count(b"[DONE]") < 2:
            received += sock.recv(1 << 16)
        ids = [[ord(c) % 97 for c in text] for text in ("abc", "xyz")]
        for number, (prompt, count) in enumerate(zip(ids, (9, 7), strict=True)):
            text = "".join(f"<{i}>" for i in continuation(prompt, count))
            events = received.split(b"[DONE]")[number].split(b"\n")
            values = [json.loads(line[6:]) for line in events if line.startswith(b"data: {")]
            assert "".join(value["choices"][0]["text"] for value in values) == text


def threads() -> tuple[int, int]:
    """Return how many threads there are besides those that check, and how many check.

    Of the latter one is started when none is free, so their number grows to its bound in time.
    """
    names = [thread.name for thread in threading.enumerate()]
    checkers = sum(name.startswith("slipstream-check") for name in names)
    return len(names) - checkers, checkers


def test_a_thousand_cancelled_requests_leak_nothing(engine: Engine) -> None:
    rng = random.Random(0)
    with inside(engine) as server:

        def visit(count: int) -> None:
            for _ in range(count):
                stream = rng.random() < 0.7
                prompt = "abcdefgh" * rng.randrange(1, 20)
                sock = server.send(prompt=prompt, stream=stream, n=rng.choice((1, 1, 2)), **ENDLESS)
                if stream and rng.random() < 0.5:
                    sock.recv(100)
                sock.close()

        visit(10)
        eventually(lambda: is_idle(server))
        threads_before, _ = threads()
        visitors = [threading.Thread(target=visit, args=[125]) for _ in range(8)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(PATIENCE_S)
        eventually(lambda: is_idle(server))
        others, checkers = threads()
        assert others == threads_before
        assert checkers <= NUM_CHECKERS
        assert not engine._deliveries._receivers
        assert server.complete(max_tokens=5, temperature=0).status == 200


def test_a_stop_lets_running_requests_finish_and_refuses_new_ones(engine: Engine) -> None:
    with inside(engine) as server:
        running = server.send(stream=True, **ENDLESS | {"max_tokens": 400})
        while b"data: " not in running.recv(1 << 16):
            pass
        kept = server.connect()  # a connection that was there before
        server.server.stop()
        received = b""
        while b"[DONE]" not in received:
            piece = running.recv(1 << 16)
            assert piece
            received += piece
        running.close()
        assert b'"finish_reason": "length"' in received
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        kept.close()


def test_grace_that_is_over_ends_streams_cleanly(engine: Engine) -> None:
    with inside(engine, shutdown_timeout=1) as server:
        sock = server.send(stream=True, **ENDLESS)
        whole = server.send(**ENDLESS)
        while b"data: " not in sock.recv(1 << 16):
            pass
        server.server.stop()
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
        last = received.split(b"data: ")[-2]
        assert json.loads(last)["error"]["code"] == "stopping"
        assert b"data: [DONE]\n\n" in received
        assert whole.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        whole.close()
        sock.close()
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()


def test_a_port_in_use_is_known_before_the_model_is_loaded() -> None:
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1 port {port}: Address already in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1") as caught:  # RFC 5737
        bind(ServerConfig(host="192.0.2.1", port=0))
    assert "--host" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="cannot listen on no-such-host"):
        bind(ServerConfig(host="no-such-host.invalid"))
    with bind(ServerConfig(port=0)) as sock:
        assert address_of(sock).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_code_0(
    toy: Path, tmp_path: Path, number: signal.Signals
) -> None:
    trace = tmp_path / "trace.json"
    with serving(toy, "--record", str(trace)) as server:
        ask(server, max_tokens=30)
        server.signal(number)
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.lines)
    rounds = json.loads(trace.read_text())["traces"][0]["rounds"]
    assert sum(part["emitted"] for part in rounds) > 0


def test_a_second_signal_ends_what_runs_at_once(toy: Path) -> None:
    with serving(toy) as server:
        sock = open_stream(server)
        server.signal()
        time.sleep(0.2)  # two signals at once may arrive as one
        assert server.process.poll() is None
        server.signal()
        assert server.wait() == 0
        while sock.recv(1 << 16):
            pass
        sock.close()


def test_a_killed_server_leaves_a_profile_that_the_next_one_reads(
    toy: Path, tmp_path: Path
) -> None:
    variables = {"SLIPSTREAM_PROFILE": "on", "SLIPSTREAM_CACHE_DIR": str(tmp_path)}
    with serving(toy, **variables) as server:
        sock = open_stream(server)
        eventually(lambda: any((tmp_path / "profiles").glob("*.json")))
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        sock.close()
        port = server.port
    (profile,) = (tmp_path / "profiles").glob("*.json")
    kept = json.loads(profile.read_text())
    assert kept["state"]["cost"]
    with serving(toy, "--port", str(port), **variables) as server:  # the same port again
        assert server.port == port
        ask(server, max_tokens=30)
        server.signal()
        assert server.wait() == 0
        assert not any("damaged" in line for line in server.lines)
    assert json.loads(profile.read_text())["key"] == kept["key"]


def ask(server: ServerProcess, **fields: Any) -> Any:
    """Return a text completion."""
    body = json.dumps({"prompt": "hello", "temperature": 0, "ignore_eos": True} | fields).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def open_stream(server: ServerProcess) -> socket.socket:
    """Return a connection on which a long stream has begun."""
    sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    sock.sendall(request_bytes({"prompt": "hello", "stream": True, "n": 8, **ENDLESS}))
    received = b""
    while b"data: " not in received:
        received += sock.recv(1 << 16)
    return sock
