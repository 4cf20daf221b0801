"""Whatever comes in, what goes out is an answer: never a 5xx for a fault of the client's."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.server.schema import UNSERVED
from slipstream.server.unserved import UnservedFields
from tests.engine_checks import check_engine
from tests.fake_model import fake_engine
from tests.fake_talker import Transcript
from tests.server.inside import Inside, inside, request_bytes
from tests.server.process import eventually

LONG = {"max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Inside]:
    engine = fake_engine(template=Transcript(), max_model_len=512)
    with inside(engine, max_body_bytes=1 << 16) as running:
        yield running
    check_engine(engine)
    assert (engine.num_requests, engine.pages.num_taken) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a" * 512}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -(10**30)}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"speculation": {"mode": "fast"}}, "speculation.mode"),
        ({"speculation": {"mode": "fixed"}}, "speculation.k"),
        ({"speculation": {"mode": "fixed", "k": 99}}, "speculation.k"),
        ({"speculation": {"k": 16}}, "speculation.k"),
        ({"speculation": {"k": -1}}, "speculation.k"),
        ({"speculation": {"mode": "off", "k": 2}}, "speculation.k"),
        ({"speculation": {"width": 2}}, "speculation.width"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"temprature": 0.5}, "temprature"),
        ({"max_token": 5}, "max_token"),
        ({"model": "other"}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_field_is_named(server: Inside, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = server.complete(**{"stream": stream} | fields)
        assert answer.status == (404 if fields.get("model") == "other" else 400)
        error = answer.value["error"]
        assert error["param"] == param
        assert error["message"]
        assert error["code"]
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": "hi"}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"functions": []}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"n_predict": 5}, "n_predict"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ],
)
def test_a_wrong_field_of_chat_is_named(
    server: Inside, fields: dict[str, Any], param: str | None
) -> None:
    answer = server.chat(**fields)
    assert answer.status == 400
    named = answer.value["error"]["param"]
    assert named == param if param else named.startswith("messages.0.content")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"\0" * 100,
        b"[" * 50_000,
        b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b'{"prompt": "a", "\\ud800": 1, "n": 0}',
    ],
)
def test_a_broken_body_is_refused(server: Inside, body: bytes) -> None:
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.value["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "key", ["model", "prompt", "stop", "user", "\\ud800", "temperaturf\\ud800"]
)
def test_text_that_is_no_unicode_breaks_nothing(server: Inside, key: str) -> None:
    body = b'{"prompt": "a", "%s": "\\ud800"}' % key.encode()
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status < 500
    assert json.loads(answer.body)


def test_bodies_of_other_kinds_and_paths_are_refused(server: Inside) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = server.ask("POST", "/v1/completions", b'{"prompt": "a"}', {"Content-Type": kind})
        assert answer.status == 400
        assert "application/json" in answer.value["error"]["message"]
        assert "hint: check the header" in answer.value["error"]["message"]
    listed = server.ask("POST", "/v1/completions", b"[1]").value["error"]["message"]
    assert "JSON object" in listed
    assert "hint" not in listed
    broken = server.ask("POST", "/v1/completions", b'{"prompt": }').value["error"]
    assert broken["code"] == "invalid_json"
    assert "at character 11" in broken["message"]
    assert server.ask("GET", "/v1/completions").status == 405
    unknown = server.ask("POST", "/v1/nothing", {}).value["error"]
    assert unknown["code"] == "unknown_path"
    assert "hint" not in unknown["message"]
    bare = server.ask("POST", "/chat/completions", {}).value["error"]["message"]
    assert bare == "no such path: POST /chat/completions (hint: did you mean /v1/chat/completions?)"
    for path in ("/v1/chat/completions/", "/chat/completions/"):
        slashed = server.ask("POST", path, {"messages": []})
        assert (slashed.status, slashed.value["error"]["code"]) == (404, "unknown_path")
        assert "hint: did you mean /v1/chat/completions?" in slashed.value["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/metrics", "/no"])
def test_head_is_get_without_its_body(server: Inside, path: str) -> None:
    whole, head = server.ask("GET", path), server.ask("HEAD", path)
    assert whole.body
    assert head.body == b""
    changing = ("date", "content-length") if path == "/metrics" else ("date",)
    own, theirs = (
        {key.lower(): value for key, value in each.headers.items() if key.lower() not in changing}
        for each in (head, whole)
    )
    if path == "/no":  # the method is a part of what it says
        assert (head.status, whole.status) == (404, 404)
    else:
        assert (head.status, own) == (whole.status, theirs)
    assert int(head.headers["content-length"]) > 0


def test_head_needs_the_key_as_get_does() -> None:
    with inside(fake_engine(), api_key="secret") as keyed:
        assert keyed.ask("HEAD", "/v1/models").status == 401
        assert keyed.ask("HEAD", "/health").status == 200
        key = {"Authorization": "Bearer secret"}
        assert keyed.ask("HEAD", "/v1/models", headers=key).status == 200


def test_head_of_what_is_posted_is_refused(server: Inside) -> None:
    refused = server.ask("HEAD", "/v1/completions")
    assert (refused.status, refused.body) == (405, b"")


def test_a_field_that_is_not_served_is_not_called_mistyped(server: Inside) -> None:
    answer = server.chat(verbosity="low")
    assert answer.status == 400
    assert answer.value["error"] == {
        "message": 'verbosity is not served here, got "low" (hint: leave it out)',
        "type": "invalid_request_error",
        "param": "verbosity",
        "code": "unsupported_parameter",
    }
    assert server.ask("GET", "/docs").status == 404


@pytest.mark.parametrize("name", sorted(UnservedFields.model_fields))
def test_a_field_of_another_server_is_refused_with_what_serves_instead(
    server: Inside, name: str
) -> None:
    for answer in (server.chat(**{name: "x"}), server.complete(**{name: "x"})):
        error = answer.value["error"]
        assert (answer.status, error["param"]) == (400, name)
        assert error["code"] == "unsupported_parameter"
        assert error["message"] == (f'{name} is not served here, got "x" (hint: {UNSERVED[name]})')


def test_a_field_that_says_what_is_done_anyway_is_taken(server: Inside) -> None:
    neutral = {"add_generation_prompt": True, "use_beam_search": False, "guided_json": None}
    answer = server.chat(**neutral)
    assert answer.status == 200
    assert answer.value["slipstream"]["ignored_fields"] == []
    message = server.complete(echo=True).value["error"]["message"]
    assert message == "echo is not served here, got true (hint: leave it out)"


ROLES = "one of system, developer, user, assistant, tool"


@pytest.mark.parametrize(
    ("turn", "param", "message"),
    [
        (
            {"role": "asistant", "content": "a"},
            "messages.0.role",
            f'messages.0.role must be {ROLES}, got "asistant" (hint: did you mean assistant?)',
        ),
        (
            {"role": "bot", "content": "a"},
            "messages.0.role",
            f'messages.0.role must be {ROLES}, got "bot"',
        ),
        (
            {"role": "user"},
            "messages.0.content",
            "messages.0.content must be given for the role user",
        ),
        (
            {"role": "system", "content": None},
            "messages.0.content",
            "messages.0.content must be given for the role system",
        ),
        (
            {"role": "assistant"},
            "messages.0.content",
            "messages.0.content or tool_calls must be given for the role assistant",
        ),
        (
            {"role": "user", "contents": "a"},
            "messages.0.contents",
            "unknown key messages.0.contents (hint: did you mean content?)",
        ),
        (
            {"rol": "user", "content": "a"},
            "messages.0.role",
            "messages.0.role must be given, got the key rol (hint: did you mean role?)",
        ),
        ("hi", "messages.0", 'messages.0 must be an object, got "hi"'),
        (
            {"role": "user", "content": 5},
            "messages.0.content",
            "messages.0.content must be text or a list of text parts, got 5",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content",
            "messages.0.content: only text parts are served, got image_url",
        ),
        (
            {"role": "user", "content": ["hi"]},
            "messages.0.content.0",
            'messages.0.content.0 must be an object, got "hi"',
        ),
        (
            {"role": "user", "content": []},
            "messages.0.content",
            "messages.0.content must have at least 1 part, got 0",
        ),
        (
            {"role": "user", "content": "a", "\ud800": 1},
            "messages.0",
            'keys of messages.0 must be Unicode text, got "\\ud800"',
        ),
    ],
)
def test_a_wrong_turn_is_answered_with_what_is_allowed(
    server: Inside, turn: Any, param: str, message: str
) -> None:
    answer = server.chat(messages=[turn])
    assert answer.status == 400
    assert (answer.value["error"]["param"], answer.value["error"]["message"]) == (param, message)


def test_further_keys_of_a_turn_are_the_templates(server: Inside) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "a", "name": "me", "reasoning_content": "b"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]
    assert server.chat(messages=turns).status == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"temperature": "hot"}, 'temperature must be a number, got "hot"'),
        ({"response_format": "json"}, 'response_format must be an object, got "json"'),
        ({"metadata": 4}, "metadata must be an object, got 4"),
        ({"stop": [1]}, "stop must be text or a list of texts, got [1]"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        (
            {"prompt": [1, "a"]},
            "prompt must be text, a list of texts, a list of token ids or a list of lists of token "
            'ids, got [1, "a"]',
        ),
        (
            {"response_format": {"type": "xml"}},
            'response_format.type must be one of text, json_object, json_schema, got "xml"',
        ),
    ],
)
def test_a_wrong_type_is_told_in_plain_words(
    server: Inside, fields: dict[str, Any], message: str
) -> None:
    assert server.complete(**fields).value["error"]["message"] == message


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"prompt": "a", "\\ud800": 1}', "the body"),
        (b'{"prompt": "a", "speculation": {"\\ud800": 1}}', "speculation"),
    ],
)
def test_a_key_that_is_no_unicode_is_called_that(server: Inside, body: bytes, where: str) -> None:
    error = server.ask("POST", "/v1/completions", body).value["error"]
    assert error["message"] == f'keys of {where} must be Unicode text, got "\\ud800"'


def test_a_misspelt_field_that_must_be_there_is_recognized(server: Inside) -> None:
    error = server.ask("POST", "/v1/chat/completions", {"message": []}).value["error"]
    assert (error["param"], error["code"]) == ("messages", "missing_parameter")
    assert error["message"] == (
        "messages must be given, got the key message (hint: did you mean messages?)"
    )


def test_unknown_keys_are_tolerated_and_named(server: Inside) -> None:
    answer = server.complete(frobnicate=1, user="me", metadata={"a": "b"}, store=False)
    assert answer.status == 200
    assert answer.value["slipstream"]["ignored_fields"] == ["frobnicate"]
    last = server.complete(frobnicate=1, stream=True).events[-1]
    assert last["slipstream"]["ignored_fields"] == ["frobnicate"]


def test_a_misspelt_key_is_answered_with_the_right_one(server: Inside) -> None:
    message = server.complete(temprature=1).value["error"]["message"]
    assert message.endswith("(hint: did you mean temperature?)")


def test_a_body_that_is_too_long_is_refused_however_it_comes(server: Inside) -> None:
    body = {"prompt": "a", "user": "x" * (1 << 16)}
    assert server.ask("POST", "/v1/completions", body).status == 413
    with server.connect() as sock:  # without a length
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n")
        sock.sendall(b"Content-Type: application/json\r\n\r\n")
        for _ in range(40):
            try:
                sock.sendall(b"800\r\n" + b" " * 2048 + b"\r\n")
            except OSError:
                break
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_bytes_that_are_no_http_end_the_connection(server: Inside) -> None:
    for garbage in (b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3"):
        with server.connect() as sock:
            sock.sendall(garbage)
            head, _, body = received(sock).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"content-type: application/json" in head
            assert json.loads(body)["error"]["code"] == "invalid_http"
    assert server.complete().status == 200


def test_bytes_that_are_no_http_never_get_into_a_reply(server: Inside) -> None:
    with server.send(stream=True, ignore_eos=True, **LONG) as sock:
        got = sock.recv(1 << 16)
        with contextlib.suppress(ConnectionError):  # ends with a reset
            sock.sendall(b"\0\1\2\r\n\r\n")
            got += received(sock)
        reply, _, answer = got.partition(b"HTTP/1.1 400 ")
        assert reply.count(b"HTTP/1.1") == 1
        assert b"invalid_http" not in reply
        if answer:  # the reply was faster than the bytes, and was over before they were answered
            assert reply.endswith(b"\r\n0\r\n\r\n")


def test_a_wish_for_another_protocol_is_passed_over_without_a_word(
    server: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    for wish in ("websocket", "h2c"):
        headers = {"Connection": "Upgrade", "Upgrade": wish}
        assert server.ask("GET", "/version", headers=headers).status == 200
        raw = request_bytes({"prompt": "a", "max_tokens": 3})
        raw = raw.replace(
            b"Host: x", b"Host: x\r\nConnection: Upgrade\r\nUpgrade: %s" % wish.encode()
        )
        last = request_bytes({"prompt": "a", "max_tokens": 3}).replace(
            b"Host: x", b"Connection: close"
        )
        with server.connect() as sock:  # in pieces, and others behind it
            for piece in (raw[:-9], raw[-9:] + raw, last):
                sock.sendall(piece)
                time.sleep(0.01)
            assert received(sock).count(b"HTTP/1.1 200 OK") == 3
    assert caplog.text == ""


def received(sock: socket.socket) -> bytes:
    """Return everything that comes until the other side closes."""
    got = b""
    while piece := sock.recv(1 << 16):
        got += piece
    return got


def test_a_request_without_tokens_to_choose_from_fails_alone(server: Inside) -> None:
    bias = {str(token): -100 for token in range(97)}
    assert server.complete(logit_bias=bias).status == 200  # all alike: none is forbidden
    for stream in (False, True):
        answer = server.complete(bad_words_ids=[[token] for token in range(97)], stream=stream)
        assert (answer.status, answer.value["error"]["code"]) == (400, "no_token")
    assert server.complete().status == 200


def test_only_the_right_key_opens() -> None:
    with inside(fake_engine(), api_key="secret") as server:
        for headers in ({}, {"Authorization": "secret"}, {"Authorization": "Bearer secre"}):
            for path in ("/v1/models", "/metrics", "/v1/speculation", "/openapi.json"):
                answer = server.ask("GET", path, headers=headers)
                assert (answer.status, answer.value["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("POST", "/v1/completions", {"prompt": "a"}, headers).status == 401
        right = {"Authorization": "Bearer secret"}
        for scheme in ("Bearer", "bearer", "BEARER "):
            named = {"Authorization": f"{scheme} secret"}
            assert server.ask("GET", "/v1/models", headers=named).status == 200
        assert (
            server.ask("GET", "/v1/models", headers={"Authorization": "Basic secret"}).status == 401
        )
        assert server.ask("POST", "/v1/completions", {"prompt": "a"}, right).status == 200
        for path in ("/health", "/version", "/"):
            assert server.ask("GET", path).status == 200


def test_a_full_queue_is_answered_429_and_has_room_again() -> None:
    engine = fake_engine(max_model_len=512, max_num_seqs=1, after_forward=lambda: time.sleep(0.002))
    with inside(engine, max_queue=2) as server:
        held = [server.send(stream=True, **LONG) for _ in range(3)]
        eventually(lambda: server.health()["running_or_waiting"] == 3)
        answer = server.complete()
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.value["error"]["code"] == "queue_full"
        for sock in held:
            sock.close()
        eventually(lambda: server.health()["running_or_waiting"] == 0)
        assert server.complete().status == 200
    check_engine(engine)


def test_a_request_of_many_replies_takes_a_place_for_each() -> None:
    engine = fake_engine(max_model_len=512, max_num_seqs=1, after_forward=lambda: time.sleep(0.002))
    with inside(engine, max_queue=3) as server:
        for fields in ({"n": 5}, {"prompt": ["abc"] * 5}, {"prompt": ["abc"] * 3, "n": 2}):
            answer = server.complete(**fields)
            assert (answer.status, answer.value["error"]["code"]) == (400, "too_many_replies")
        with server.send(stream=True, **LONG):
            eventually(lambda: server.health()["running_or_waiting"] == 1)
            answer = server.complete(n=4)
            assert (answer.status, answer.value["error"]["code"]) == (429, "queue_full")
            assert server.complete(n=0).value["error"]["param"] == "n"
            assert server.health()["running_or_waiting"] == 1
        eventually(lambda: server.health()["running_or_waiting"] == 0)
        assert len(server.complete(prompt=["abc"] * 2, n=2).value["choices"]) == 4
    check_engine(engine)


def test_limits_of_tokens_are_kept() -> None:
    with inside(fake_engine(), max_reply_tokens=5, default_max_tokens=3) as server:
        assert server.complete(max_tokens=6).value["error"]["param"] == "max_tokens"
        assert server.complete(max_tokens=5).value["usage"]["completion_tokens"] == 5
        assert server.complete().value["usage"]["completion_tokens"] == 5
        assert server.chat().status == 400  # no template
    engine = fake_engine(template=Transcript())
    with inside(engine, default_max_tokens=3) as server:
        assert server.chat().value["usage"]["completion_tokens"] == 3
        assert server.complete().value["usage"]["completion_tokens"] == 16


def test_a_server_without_a_template_says_so() -> None:
    with inside(fake_engine()) as server:
        answer = server.chat()
        assert answer.status == 400
        assert "chat template" in answer.value["error"]["message"]


def test_a_ceiling_of_the_server_holds_for_every_request() -> None:
    from slipstream.drafters.ngram import NGramDrafter

    with inside(fake_engine(drafter=NGramDrafter, max_k=3, max_model_len=512)) as server:
        wide = server.complete(speculation={"mode": "fixed", "k": 4})
        assert wide.status == 400
        assert wide.value["error"]["message"].startswith("speculation.k must be in [0, 3]")
        narrow = server.complete(speculation={"mode": "fixed", "k": 3}, **LONG)
        report = narrow.value["slipstream"]["choices"][0]["speculation"]
        assert max(map(int, report["k_histogram"])) == 3
        assert server.complete(speculation={"k": 4}).value["error"]["param"] == "speculation.k"
    with inside(fake_engine(drafter=NGramDrafter, k="off", max_model_len=512)) as server:
        for mode in ("auto", "off"):
            answer = server.complete(speculation={"mode": mode}, **LONG).value
            assert answer["slipstream"]["choices"][0]["speculation"]["drafted"] == 0


def test_a_slow_sender_is_not_waited_for() -> None:
    raw = request_bytes({"prompt": "abc"})
    # Nothing, half a head, half a body; and half a head after a request.
    with inside(fake_engine(), receive_timeout=1) as server:
        socks = [server.connect() for _ in range(4)]
        for sock, piece in zip(socks, (b"", raw[:20], raw[:-3], raw + raw[:20]), strict=True):
            sock.sendall(piece)
        received = []
        for sock in socks:
            with sock:
                answer = b""
                while piece := sock.recv(1 << 16):
                    answer += piece
                received.append(answer)
    assert received[:2] == [b"", b""]
    assert received[2].startswith(b"HTTP/1.1 408 ")
    assert received[3].startswith(b"HTTP/1.1 200 ")


def test_a_body_is_not_counted_as_the_head_that_follows_it() -> None:
    raw = request_bytes({"prompt": "abc", "max_tokens": 1, "user": "x" * 100_000})
    with inside(fake_engine()) as server, server.connect() as sock:
        sock.sendall(raw + raw[:20])
        received, rest = b"", raw[20:]
        while received.count(b"200 OK") < 2:
            piece = sock.recv(1 << 16)
            assert piece, received
            received += piece
            sock.sendall(rest)
            rest = b""


def test_a_head_without_end_is_cut_off(server: Inside) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        sock.settimeout(10.0)  # well before the head would be too slow
        with contextlib.suppress(ConnectionError):  # closed while we were sending
            for number in range(10_000):
                sock.sendall(b"x-%d: %s\r\n" % (number, b"a" * 100))
            assert sock.recv(12) in (b"HTTP/1.1 400", b"")


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = fake_engine(max_model_len=4096, after_forward=lambda: time.sleep(0.005))
    with inside(engine, request_timeout=1) as server:
        fields = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        whole = server.complete(**fields)
        assert (whole.status, whole.value["error"]["code"]) == (504, "request_timeout")
        events = server.complete(stream=True, **fields).events
        assert events[0]["choices"][0]["text"]
        assert events[-1]["error"]["code"] == "request_timeout"
        eventually(lambda: engine.num_requests == engine.pages.num_taken == 0)


def test_a_failing_step_is_an_error_and_the_next_is_served() -> None:
    is_broken = [True]

    def fail() -> None:
        if is_broken[0]:
            raise RuntimeError("lost")

    with inside(fake_engine(after_forward=fail)) as server:
        for stream in (False, True):
            answer = server.complete(stream=stream)
            assert answer.status == 500
            assert answer.value["error"]["type"] == "server_error"
        is_broken[0] = False
        assert server.complete().status == 200


def test_a_fault_of_our_own_is_an_error_object_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = fake_engine()

    def broken(*_: object) -> None:
        raise KeyError("ours")

    engine.check = broken  # type: ignore[assignment, method-assign]
    with inside(engine) as server:
        answer = server.complete()
        assert (answer.status, answer.value["error"]["type"]) == (500, "server_error")
        assert "ours" not in answer.value["error"]["message"]
        assert server.health()["running_or_waiting"] == 0
    assert "KeyError: 'ours'" in caplog.text


def test_the_openapi_document_has_every_route(server: Inside) -> None:
    document = json.loads(server.ask("GET", "/openapi.json").body)
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/speculation",
        "/metrics",
        "/health",
        "/version",
    } <= set(document["paths"])
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
