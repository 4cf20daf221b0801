"""Check sampling parameters: all of them, before anything of a request runs.

Ranges are those of the OpenAI API (penalties, bias, logprobs, stops) and of vLLM (the rest).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, get_args

from slipstream.errors import RequestError
from slipstream.types import Grammar, GrammarKind, SamplingParams

MAX_TEMPERATURE = 100.0
# Far below 1 logits overflow; the inverse of the largest is as far as anybody goes.
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0  # OpenAI's presence and frequency penalties
MAX_BIAS = 100.0  # OpenAI's logit bias
MAX_CHOICES = 64
MAX_LOGPROBS = 20  # OpenAI's top_logprobs
MAX_STOPS = 16
# Each is held against the end of every row, and takes some 0.2 us there: a step of all rows would
# wait for milliseconds beyond this.
MAX_BAD_WORDS = 2048


def validate_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Check every field except `k` and the range of `max_k`, which depend on the engine.

    Args:
        vocab_size: token ids are below it.

    Raises:
        RequestError: a field is of a wrong type (code "invalid_type") or out of range (code
            "invalid_value"); `param` names it.
    """
    max_tokens = _integer(params.max_tokens, "max_tokens", low=1)
    _integer(params.min_tokens, "min_tokens", low=0, high=max_tokens)
    _number(params.temperature, "temperature", low=0, high=MAX_TEMPERATURE)
    _number(params.top_p, "top_p", low=0, high=1, without_low=True)
    _integer(params.top_k, "top_k", low=0)
    _number(params.min_p, "min_p", low=0, high=1)
    _number(
        params.repetition_penalty,
        "repetition_penalty",
        low=MIN_REPETITION_PENALTY,
        high=MAX_REPETITION_PENALTY,
    )
    _number(params.presence_penalty, "presence_penalty", low=-MAX_PENALTY, high=MAX_PENALTY)
    _number(params.frequency_penalty, "frequency_penalty", low=-MAX_PENALTY, high=MAX_PENALTY)
    _integer(params.n, "n", low=1, high=MAX_CHOICES)
    if params.logprobs is not None:
        _integer(params.logprobs, "logprobs", low=0, high=MAX_LOGPROBS)
    if params.seed is not None and not 0 <= _integer(params.seed, "seed") < 2**64:
        raise _wrong("seed", "in [0, 2**64)", params.seed)
    if params.max_k is not None:
        _integer(params.max_k, "max_k")
    if not isinstance(params.ignore_eos, bool):
        raise _mistyped("ignore_eos", "true or false", params.ignore_eos)
    for token_id in _items(params.stop_token_ids, "stop_token_ids"):
        _token(token_id, "stop_token_ids", vocab_size)
    _check_bias(params.logit_bias, vocab_size)
    _check_bad_words(params, vocab_size)
    _check_stops(params.stop)
    _check_grammar(params)
    if params.prediction is not None and not isinstance(params.prediction, str):
        raise _mistyped("prediction", "a text", params.prediction)


def _check_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    for pair in _items(bias, "logit_bias"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _mistyped("logit_bias", "a mapping of token ids to numbers", pair)
        _token(pair[0], "logit_bias", vocab_size)
        _number(pair[1], "logit_bias", low=-MAX_BIAS, high=MAX_BIAS)


def _check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    for word in _items(params.bad_words_ids, "bad_words_ids"):
        if not _items(word, "bad_words_ids"):
            raise _wrong("bad_words_ids", "sequences of at least 1 token", "an empty one")
        for token_id in word:
            _token(token_id, "bad_words_ids", vocab_size)
    _texts(params.bad_words, "bad_words")
    for words, param in ((params.bad_words_ids, "bad_words_ids"), (params.bad_words, "bad_words")):
        if len(words) > MAX_BAD_WORDS:
            raise _wrong(param, f"at most {MAX_BAD_WORDS} sequences", len(words))


def _check_stops(stop: Any) -> None:
    _texts(stop, "stop")
    if len(stop) > MAX_STOPS:
        raise _wrong("stop", f"at most {MAX_STOPS} texts", len(stop))


def _check_grammar(params: SamplingParams) -> None:
    """Check what a grammar is; whether it can be enforced is for its compiler to say."""
    grammar: Any = params.grammar
    if grammar is None:
        return
    if not isinstance(grammar, Grammar):
        raise _mistyped("grammar", "a Grammar", grammar)
    if grammar.kind not in get_args(GrammarKind):
        kinds = ", ".join(get_args(GrammarKind))
        raise _wrong("grammar", f"of one of the kinds {kinds}", repr(grammar.kind))
    if not isinstance(grammar.definition, str):
        kind = type(grammar.definition).__name__
        raise _mistyped("grammar", "defined by JSON text, JSON values or a pattern", kind)
    if params.ignore_eos:
        raise RequestError(
            "ignore_eos must be false with a grammar, whose end only a stop id can follow",
            param="ignore_eos",
            code="invalid_value",
        )


def _texts(values: Any, param: str) -> None:
    for text in _items(values, param):
        if not isinstance(text, str):
            raise _mistyped(param, "a list of texts", text)
        if not text:
            raise _wrong(param, "texts of at least 1 character", "an empty one")


def _items(values: Any, param: str) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise _mistyped(param, "a list", values)
    return values


def _token(value: Any, param: str, vocab_size: int) -> None:
    if not 0 <= _integer(value, param) < vocab_size:
        raise _wrong(param, f"token ids in [0, {vocab_size})", value)


def _integer(value: Any, param: str, *, low: int | None = None, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _mistyped(param, "an integer", value) from None
    if isinstance(value, bool):
        raise _mistyped(param, "an integer", value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise _wrong(param, f">= {low}" if high is None else f"in [{low}, {high}]", number)
    return number


def _number(value: Any, param: str, *, low: float, high: float, without_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _mistyped(param, "a number", value)
    # NaN fails every comparison, so what is allowed is asked, not what is wrong.
    number: Any = value
    if not ((number > low if without_low else number >= low) and number <= high):
        raise _wrong(param, f"in {'(' if without_low else '['}{low:g}, {high:g}]", value)


def _wrong(param: str, allowed: str, got: Any) -> RequestError:
    return RequestError(f"{param} must be {allowed}, got {got}", param=param, code="invalid_value")


def _mistyped(param: str, allowed: str, got: Any) -> RequestError:
    return RequestError(f"{param} must be {allowed}, got {got!r}", param=param, code="invalid_type")
