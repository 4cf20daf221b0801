"""Sampling parameters are checked completely, and an error names what, the allowed and the got."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slipstream.engine.sampling import validate_sampling
from slipstream.errors import RequestError
from slipstream.types import Grammar, SamplingParams

VOCAB_SIZE = 100
NAN, INF = float("nan"), float("inf")

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1, "min_tokens": 1},
    {"temperature": 0},
    {"temperature": 100},
    {"temperature": np.float32(0.7), "top_k": np.int64(3)},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": 10**9},
    {"min_p": 1.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100},
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"logit_bias": {0: -100, 99: 100.0}},
    {"logit_bias": ((3, 1.5),)},
    {"logit_bias": {}},
    {"bad_words_ids": [[1], [2, 3, 99]], "bad_words": ["a word"]},
    {"stop": ["\n"] * 16},
    {"stop_token_ids": [0, 99]},
    {"n": 64, "logprobs": 20},
    {"logprobs": 0},
    {"seed": 0},
    {"seed": 2**64 - 1},
]

REFUSED: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens must be >= 1, got 0"),
    ("max_tokens", 1.5, "max_tokens must be an integer, got 1.5"),
    ("max_tokens", True, "max_tokens must be an integer, got True"),
    ("min_tokens", -1, "min_tokens must be in [0, 256], got -1"),
    ("min_tokens", 257, "min_tokens must be in [0, 256], got 257"),
    ("max_k", 1.5, "max_k must be an integer, got 1.5"),
    ("temperature", -0.1, "temperature must be in [0, 100], got -0.1"),
    ("temperature", 100.5, "temperature must be in [0, 100], got 100.5"),
    ("temperature", NAN, "temperature must be in [0, 100], got nan"),
    ("temperature", 10**400, "temperature must be in [0, 100], got 1000"),
    ("temperature", INF, "temperature must be in [0, 100], got inf"),
    ("temperature", "1", "temperature must be a number, got '1'"),
    ("temperature", None, "temperature must be a number, got None"),
    ("temperature", True, "temperature must be a number, got True"),
    ("top_p", 0, "top_p must be in (0, 1], got 0"),
    ("top_p", 1.01, "top_p must be in (0, 1], got 1.01"),
    ("top_p", NAN, "top_p must be in (0, 1], got nan"),
    ("top_k", -1, "top_k must be >= 0, got -1"),
    ("top_k", 2.0, "top_k must be an integer, got 2.0"),
    ("min_p", -0.1, "min_p must be in [0, 1], got -0.1"),
    ("min_p", 1.1, "min_p must be in [0, 1], got 1.1"),
    ("repetition_penalty", 0, "repetition_penalty must be in [0.01, 100], got 0"),
    ("repetition_penalty", 3e-225, "repetition_penalty must be in [0.01, 100], got 3e-225"),
    ("repetition_penalty", 101, "repetition_penalty must be in [0.01, 100], got 101"),
    ("presence_penalty", 2.1, "presence_penalty must be in [-2, 2], got 2.1"),
    ("frequency_penalty", -2.1, "frequency_penalty must be in [-2, 2], got -2.1"),
    ("frequency_penalty", -INF, "frequency_penalty must be in [-2, 2], got -inf"),
    ("logit_bias", {100: 1.0}, "logit_bias must be token ids in [0, 100), got 100"),
    ("logit_bias", {-1: 1.0}, "logit_bias must be token ids in [0, 100), got -1"),
    ("logit_bias", {"5": 1.0}, "logit_bias must be an integer, got '5'"),
    ("logit_bias", {5: -INF}, "logit_bias must be in [-100, 100], got -inf"),
    ("logit_bias", {5: 101}, "logit_bias must be in [-100, 100], got 101"),
    ("logit_bias", [5], "logit_bias must be a mapping of token ids to numbers, got 5"),
    ("logit_bias", 5, "logit_bias must be a list, got 5"),
    ("bad_words_ids", [[]], "bad_words_ids must be sequences of at least 1 token, got an empty"),
    ("bad_words_ids", [[100]], "bad_words_ids must be token ids in [0, 100), got 100"),
    ("bad_words_ids", [3], "bad_words_ids must be a list, got 3"),
    ("bad_words", [""], "bad_words must be texts of at least 1 character, got an empty one"),
    ("bad_words", "word", "bad_words must be a list, got 'word'"),
    ("bad_words", ["word"] * 2049, "bad_words must be at most 2048 sequences, got 2049"),
    ("bad_words_ids", [[1]] * 2049, "bad_words_ids must be at most 2048 sequences, got 2049"),
    ("stop", [""], "stop must be texts of at least 1 character, got an empty one"),
    ("stop", ["x"] * 17, "stop must be at most 16 texts, got 17"),
    ("stop", [7], "stop must be a list of texts, got 7"),
    ("stop", 7, "stop must be a list, got 7"),
    ("stop_token_ids", [100], "stop_token_ids must be token ids in [0, 100), got 100"),
    ("stop_token_ids", 3, "stop_token_ids must be a list, got 3"),
    ("n", 0, "n must be in [1, 64], got 0"),
    ("n", 65, "n must be in [1, 64], got 65"),
    ("logprobs", -1, "logprobs must be in [0, 20], got -1"),
    ("logprobs", 21, "logprobs must be in [0, 20], got 21"),
    ("logprobs", False, "logprobs must be an integer, got False"),
    ("seed", -1, "seed must be in [0, 2**64), got -1"),
    ("seed", 2**64, "seed must be in [0, 2**64), got 18446744073709551616"),
    ("seed", 1.0, "seed must be an integer, got 1.0"),
    ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
    ("grammar", "json", "grammar must be a Grammar, got 'json'"),
    (
        "grammar",
        Grammar(kind="yaml"),  # type: ignore[arg-type]
        "grammar must be of one of the kinds json_object, json_schema, regex, got 'yaml'",
    ),
    (
        "grammar",
        Grammar(kind="json_schema", definition={"const": float("nan")}),  # type: ignore[arg-type]
        "grammar must be defined by JSON text, JSON values or a pattern, got 'dict'",
    ),
    ("prediction", ["text"], "prediction must be a text, got ['text']"),
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_every_allowed_value_passes(fields: dict[str, Any]) -> None:
    validate_sampling(SamplingParams(**fields), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("param", "value", "message"), REFUSED)
def test_a_wrong_value_is_named(param: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_sampling(SamplingParams(**{param: value}), vocab_size=VOCAB_SIZE)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param
    assert caught.value.code in ("invalid_value", "invalid_type")


def test_a_grammar_needs_stop_ids() -> None:
    params = SamplingParams(grammar=Grammar(kind="json_object"), ignore_eos=True)
    with pytest.raises(RequestError, match="ignore_eos must be false with a grammar") as caught:
        validate_sampling(params, vocab_size=VOCAB_SIZE)
    assert (caught.value.param, caught.value.code) == ("ignore_eos", "invalid_value")


def test_every_field_has_a_wrong_value_here() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {param for param, _, _ in REFUSED} == fields - {"k"}


def test_a_single_stop_text_is_a_list_of_one() -> None:
    params = SamplingParams(stop="END")  # type: ignore[arg-type]
    assert params.stop == ("END",)


def test_params_are_frozen_hashable_and_equal_by_value() -> None:
    lists: dict[str, Any] = {"logit_bias": {3: 1.0}, "bad_words_ids": [[1, 2]], "stop": ["x"]}
    params = SamplingParams(**lists)
    assert params.bad_words_ids == ((1, 2),)
    assert hash(params) == hash(SamplingParams(**lists))
    lists["logit_bias"][3] = 2.0
    assert params.logit_bias == ((3, 1.0),)
    assert params != SamplingParams(**lists)
