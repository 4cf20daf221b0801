"""Checks that take long: they hold up nobody else, and whoever waits for one may go."""

from __future__ import annotations

import json
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.engine.engine import Engine
from slipstream.errors import RequestError, SlipstreamError
from slipstream.server.trial import Trial
from slipstream.types import Grammar
from tests.fake_model import fake_engine
from tests.grammars import TOKENIZER, VOCAB_SIZE
from tests.server.inside import Inside, inside
from tests.server.process import PATIENCE_S, ServerProcess, eventually
from tests.server.test_lifecycle import ask

pytest.importorskip("llguidance", reason="grammars' package is not installed")

EASY = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
# What is said about an intersection doubles with each of its patterns: hours, and all memory.
BOMB = {"allOf": [{"type": "string", "pattern": f"[a-z]{{0,{50 + i}}}[0-9]"} for i in range(40)]}
# Some 0.1 s for one reply.
MANY = [f"p{index}" for index in range(2000)]
HEAVY = {"type": "object", "properties": {key: {"type": "null"} for key in MANY}, "required": MANY}


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", definition=json.dumps(value))


def wanted(value: dict[str, Any], **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": value}}
    return {"max_tokens": 4, "ignore_eos": False, "response_format": form} | fields


@pytest.fixture
def trial() -> Iterator[Trial]:
    made = Trial(TOKENIZER, VOCAB_SIZE)
    yield made
    made.close()
    assert made._process is None


def test_a_trial_says_what_a_grammar_takes_and_why_another_is_refused(trial: Trial) -> None:
    assert 0.0 < trial.cpu_s(schema(EASY), None) < 1.0
    process = trial._process
    with pytest.raises(RequestError, match=r"#/properties/b.*not") as refused:
        trial.cpu_s(schema({"properties": {"b": {"not": {}}}}), None)
    assert (refused.value.param, refused.value.code) == ("grammar", "invalid_grammar")
    assert trial._process is process


def test_what_is_known_is_not_tried_again(trial: Trial) -> None:
    first = trial.cpu_s(schema(EASY), None)
    assert trial._process is not None
    trial._process.kill()
    assert trial.cpu_s(schema(EASY), None) == first


def test_a_grammar_that_never_ends_is_refused_and_the_next_is_tried(trial: Trial) -> None:
    with pytest.raises(RequestError, match="takes more") as caught:
        trial.cpu_s(schema(BOMB), None)
    assert caught.value.code == "grammar_too_expensive"
    assert trial.cpu_s(schema(EASY), None) > 0.0


def test_a_trial_is_given_up_by_who_began_it_and_nobody_else(trial: Trial) -> None:
    mine, other = object(), object()
    trial.cpu_s(schema(EASY), None)
    process = trial._process
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(trial.cpu_s, schema(BOMB), mine)
        eventually(lambda: trial._who is mine)
        trial.give_up(other)
        assert not work.done()
        trial.give_up(mine)
        with pytest.raises(RequestError):
            work.result(PATIENCE_S)
    assert process is not None
    assert process.poll() is not None


def test_a_closed_trial_starts_no_process(trial: Trial) -> None:
    trial.close()
    with pytest.raises(SlipstreamError, match="stopping"):
        trial.cpu_s(schema(EASY), None)


def test_a_schema_that_never_ends_is_the_clients_fault_and_holds_up_nobody(
    server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(3) as pool:
        bombs = [
            pool.submit(refusal, server, **wanted({**BOMB, "title": str(i)})) for i in range(3)
        ]
        served = 0
        while not all(bomb.done() for bomb in bombs):
            served += len(ask(server, max_tokens=4)["choices"])
        assert served > 3
        for bomb in bombs:
            status, error = bomb.result()
            assert (status, error["code"]) == (400, "grammar_too_expensive")
            assert error["param"] == "response_format"
    assert ask(server, **wanted(EASY, max_tokens=40))["choices"][0]["text"].startswith("{")
    eventually(server.is_idle)


def test_replies_together_have_a_bound_for_their_grammar(server: ServerProcess) -> None:
    status, error = refusal(server, **wanted(HEAVY, n=60))
    assert (status, error["code"]) == (400, "grammar_too_expensive")
    assert error["param"] == "response_format"
    assert "for 60 replies" in error["message"]
    assert len(ask(server, **wanted(HEAVY))["choices"]) == 1


class Held:
    """An engine whose checks wait until they are let go."""

    def __init__(self) -> None:
        self.engine: Engine = fake_engine()
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        check = self.engine.check

        def wait(*arguments: Any) -> Any:
            self.begun.release()
            assert self.go_on.wait(PATIENCE_S)
            return check(*arguments)

        self.engine.check = wait  # type: ignore[method-assign]


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go_on.set()


def is_free(server: Inside) -> bool:
    return bool(server.health()["running_or_waiting"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_is_checked_gives_its_place_back(
    held: Held, stream: bool
) -> None:
    with inside(held.engine) as server:
        socks = [server.send(stream=stream) for _ in range(5)]  # two are checked, three wait
        assert held.begun.acquire(timeout=PATIENCE_S)
        eventually(lambda: server.health()["running_or_waiting"] == 5)
        for sock in socks:
            sock.close()
        eventually(lambda: is_free(server))
        held.go_on.set()
        assert server.complete().status == 200
        assert held.engine.stats.finished == 1


def test_a_check_counts_as_time_of_the_request(held: Held) -> None:
    with inside(held.engine, request_timeout=1) as server:
        for stream in (False, True):
            answer = server.complete(stream=stream)
            assert (answer.status, answer.value["error"]["code"]) == (504, "request_timeout")
        assert is_free(server)
        held.go_on.set()


def test_a_stop_answers_what_is_being_checked(held: Held) -> None:
    with inside(held.engine, shutdown_timeout=1) as server:
        sock = server.send()
        assert held.begun.acquire(timeout=PATIENCE_S)
        server.server.stop()
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        sock.close()
        held.go_on.set()


def test_a_request_of_many_prompts_is_checked_no_further_than_it_is_waited_for(
    held: Held,
) -> None:
    with inside(held.engine) as server:
        sock = server.send(prompt=["abc"] * 40)
        assert held.begun.acquire(timeout=PATIENCE_S)
        sock.close()
        eventually(lambda: is_free(server))
        held.go_on.set()
        assert server.complete().status == 200
    assert not held.begun.acquire(blocking=False) or not held.begun.acquire(blocking=False)


def refusal(server: ServerProcess, **fields: Any) -> tuple[int, Any]:
    """Return status and error of a text completion that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, **fields)
    with caught.value as reply:
        return reply.code, json.load(reply)["error"]
