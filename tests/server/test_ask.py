"""What request bodies stand for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from slipstream.config import EngineConfig, ServerConfig
from slipstream.engine.prompt import Conversation
from slipstream.errors import ConfigError, RequestError
from slipstream.server.ask import Ask, chat_ask, completion_ask
from slipstream.server.schema import ChatRequest, CompletionRequest
from slipstream.server.speculative_config import METHODS, OF_A_MODEL, speculative_settings
from slipstream.types import Grammar, SamplingParams

CONFIG = ServerConfig()
TURNS = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Ask:
    return chat_ask(ChatRequest.model_validate({"messages": TURNS} | fields), CONFIG)


def completion(**fields: Any) -> Ask:
    return completion_ask(CompletionRequest.model_validate({"prompt": "a"} | fields), CONFIG)


def test_what_is_not_said_has_the_documented_default() -> None:
    assert chat().params == SamplingParams(temperature=1.0, max_tokens=1024)
    assert completion().params == SamplingParams(temperature=1.0, max_tokens=16)
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    assert chat(**nulls).params == chat().params


@pytest.mark.parametrize(
    ("field", "value", "name", "meant"),
    [
        ("max_tokens", 7, "max_tokens", 7),
        ("max_completion_tokens", 7, "max_tokens", 7),
        ("temperature", 0, "temperature", 0),
        ("seed", 2**60, "seed", 2**60),
        ("stop_token_ids", [3], "stop_token_ids", (3,)),
        ("ignore_eos", True, "ignore_eos", True),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.1, "min_p", 0.1),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("presence_penalty", 1, "presence_penalty", 1),
        ("frequency_penalty", 1, "frequency_penalty", 1),
        ("logit_bias", {"5": 2}, "logit_bias", ((5, 2),)),
        ("bad_words_ids", [[1, 2]], "bad_words_ids", ((1, 2),)),
        ("bad_words", ["x"], "bad_words", ("x",)),
        ("min_tokens", 2, "min_tokens", 2),
        ("stop", "x", "stop", ("x",)),
        ("stop", ["x", "y"], "stop", ("x", "y")),
        ("n", 3, "n", 3),
        ("logprobs", True, "logprobs", 0),
        ("speculation", {"mode": "off"}, "k", "off"),
        ("speculation", {"mode": "fixed", "k": 4}, "k", 4),
        ("speculation", {"mode": "fixed", "k": 0}, "k", 0),
        ("speculation", {"mode": "auto", "k": 4}, "max_k", 4),
        ("speculation", {"k": 4}, "k", "auto"),
        ("response_format", {"type": "text"}, "grammar", None),
        ("response_format", {"type": "json_object"}, "grammar", Grammar(kind="json_object")),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
            "grammar",
            Grammar(kind="json_schema", definition='{"type": "null"}'),
        ),
        ("guided_regex", "a+", "grammar", Grammar(kind="regex", definition="a+")),
        ("prediction", {"type": "content", "content": "x"}, "prediction", "x"),
        (
            "prediction",
            {"type": "content", "content": [{"type": "text", "text": t} for t in "xy"]},
            "prediction",
            "xy",
        ),
    ],
)
def test_a_field_reaches_its_parameter(field: str, value: Any, name: str, meant: Any) -> None:
    assert getattr(chat(**{field: value}).params, name) == meant


def test_no_parameter_of_the_engine_is_out_of_reach() -> None:
    reached = {
        case[2]
        for case in test_a_field_reaches_its_parameter.pytestmark[0].args[1]  # type: ignore[attr-defined]
    }
    assert reached == {field.name for field in dataclasses.fields(SamplingParams)}


def test_messages_are_what_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]
    (prompt,) = chat(messages=turns, tools=[TOOL], chat_template_kwargs={"think": False}).prompts
    assert isinstance(prompt, Conversation)
    assert list(prompt.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]
    assert prompt.variables == {"tools": [TOOL], "think": False}


def test_a_role_that_the_template_names_is_a_role() -> None:
    turns = [{"role": "developer", "content": "a"}, {"role": "ipython", "content": "42"}]
    body = ChatRequest.model_validate({"messages": turns})
    with pytest.raises(RequestError, match=r"must be one of .*tool, got") as caught:
        chat_ask(body, CONFIG)
    assert caught.value.param == "messages.1.role"
    (prompt,) = chat_ask(body, CONFIG, {"ipython"}).prompts
    assert isinstance(prompt, Conversation)
    assert [turn["role"] for turn in prompt.messages] == ["system", "ipython"]
    (prompt,) = chat_ask(body, CONFIG, {"ipython", "developer"}).prompts
    assert isinstance(prompt, Conversation)
    assert [turn["role"] for turn in prompt.messages] == ["developer", "ipython"]


def test_a_choice_of_no_tools_hides_them() -> None:
    (prompt,) = chat(tools=[TOOL], tool_choice="none").prompts
    assert isinstance(prompt, Conversation)
    assert prompt.variables == {}


def test_prompts_are_one_or_many() -> None:
    assert list(completion(prompt="a").prompts) == ["a"]
    assert list(completion(prompt=["a", "b"]).prompts) == ["a", "b"]
    assert list(completion(prompt=[1, 2]).prompts) == [[1, 2]]
    assert list(completion(prompt=[[1, 2], [3]]).prompts) == [[1, 2], [3]]


def test_a_speculative_config_means_what_it_means_elsewhere() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    settings = speculative_settings(text)
    assert settings == {"drafter": "ngram", "max_k": 4}
    assert EngineConfig(**settings).k == "auto"
    assert EngineConfig(**settings).k_ceiling == 4
    assert speculative_settings("") == {}
    text = '{"method": "draft_model", "model": "org/small", "num_speculative_tokens": 3}'
    settings = speculative_settings(text)
    assert settings == {"drafter": "org/small", "max_k": 3}
    assert EngineConfig(**settings).paid_drafter == "org/small"
    own = speculative_settings('{"method": "assistant", "model": "./head"}')
    assert EngineConfig(**own).paid_drafter == "./head"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_drafter_or_wants_a_model(method: str) -> None:
    if method in OF_A_MODEL:
        block = json.dumps({"method": method, "model": "org/small"})
        assert speculative_settings(block) == {"drafter": "org/small"}
    if method != "draft_model":
        settings = speculative_settings(json.dumps({"method": method}))
        assert EngineConfig(**settings).drafter == method


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{", "must be JSON", None),
        ("[1]", "must be a JSON object", None),
        ('{"metod": "ngram"}', "unknown key of speculative_config: metod", "did you mean method?"),
        (
            '{"num_spec_tokens": 3}',
            "unknown key of speculative_config: num_spec_tokens",
            "did you mean num_speculative_tokens?",
        ),
        ('{"num_speculative_tokens": 16}', "num_speculative_tokens must be an integer in", None),
        ('{"num_speculative_tokens": true}', "must be an integer, got True", None),
        ('{"method": "medusa"}', "speculative_config.method must be one of", None),
        ('{"method": "eagle"}', "draft_model, got 'eagle'", None),
        ('{"method": "eagle", "model": "org/head"}', "beside speculative_config.model", None),
        ('{"method": "ngram", "model": "org/small"}', "method must be one of draft_model", None),
        ('{"method": "org/small"}', "speculative_config.method must be one of", None),
        ('{"method": "draft_model", "model": "small"}', "config.model must be one of", None),
        (
            '{"method": "draft_model"}',
            "speculative_config.method draft_model needs speculative_config.model",
            "name a model of the target's vocabulary, as MODEL is named",
        ),
        ('{"method": 3}', "speculative_config.method must be text, got 3", None),
        ('{"method": ["ngram"]}', "speculative_config.method must be text", None),
        ('{"method": "ngam"}', "speculative_config.method must be one of", None),
        ('{"method": ""}', "speculative_config.method must be one of", None),
        ('{"model": {}}', "speculative_config.model must be text, got {}", None),
        (
            '{"Method": "ngram"}',
            "unknown key of speculative_config: Method",
            "did you mean method?",
        ),
        ('{"draft_model": "x"}', "unknown key of speculative_config: draft_model", None),
        ('{"num_speculative_tokens": -1}', "num_speculative_tokens must be an integer in", None),
        ('{"num_speculative_tokens": 3.5}', "must be an integer, got 3.5", None),
        ('{"num_speculative_tokens": "3"}', "must be an integer, got '3'", None),
        ('"ngram"', "must be a JSON object", None),
        ("null", "must be a JSON object", None),
        ("ngram", "must be JSON, got ngram", None),
        ("{'method': 'ngram'}", "must be JSON", None),
        ('{"method": "ngram",}', "must be JSON", None),
        ("[" * 100_000, "must be JSON", None),
    ],
)
def test_a_wrong_speculative_config_is_refused(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative_settings(text)
    assert message in caught.value.message
    assert len(caught.value.message) < 300
    if hint is not None:
        assert caught.value.hint == hint
    if "unknown key" in message:
        assert caught.value.hint
