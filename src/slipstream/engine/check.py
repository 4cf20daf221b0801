"""Everything that a caller can get wrong about a request, checked once, before anything runs."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.config import parse_k
from slipstream.drafters.base import Drafter
from slipstream.engine.request import Request
from slipstream.engine.sequence import TokenSequence
from slipstream.engine.text import Detokenizer, ReplyText
from slipstream.errors import ConfigError, RequestError
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.policy.fixed import resolve_policy
from slipstream.types import MAX_K, KSetting, SamplingParams

# JSON readers that keep numbers as doubles lose digits beyond this.
DRAWN_SEED_BITS = 53


class Tokenizer(Protocol):
    """What the engine asks of a model's tokenizer."""

    @property
    def stop_ids(self) -> Collection[int]:
        """Ids that end a reply."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text."""

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one reply."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine can serve.

    Attributes:
        vocab_size: ids are below it.
        max_model_len: prompt and output tokens together.
        num_pages: KV pages of the whole pool.
        k: the engine's own k setting; a request may only lower it.
        model_stop_ids: ids that end a reply unless the request ignores them.
    """

    vocab_size: int
    max_model_len: int
    num_pages: int
    k: KSetting
    model_stop_ids: frozenset[int]


def check_request(
    request_id: int,
    prompt_ids: Iterable[int],
    params: SamplingParams,
    *,
    limits: Limits,
    tokenizer: Tokenizer,
    make_drafter: Callable[[], Drafter] | None,
) -> list[Request]:
    """Check a request and return its choices.

    Raises:
        RequestError: a field is out of range; `param` names it.
    """
    ids = _ids(prompt_ids, "prompt", limits.vocab_size)
    limit = _limit(ids, params, limits)
    if not params.temperature == 0:  # NaN too
        raise RequestError(
            f"temperature must be 0, got {params.temperature}: only greedy is available in this "
            "version",
            param="temperature",
        )
    stops = frozenset(_ids(params.stop_token_ids, "stop_token_ids", limits.vocab_size))
    seed = _seed(params.seed)
    choices = []
    for choice in range(1):
        drafter, failure = _drafter(make_drafter)
        requested_k, ceiling = _k(params.k, limits.k, drafter)
        name = drafter.name if drafter else "none"
        request = Request(
            id=request_id,
            choice=choice,
            sequence=TokenSequence(ids),
            limit=limit,
            stop_ids=stops if params.ignore_eos else stops | limits.model_stop_ids,
            seed=seed,
            requested_k=requested_k,
            k_ceiling=ceiling,
            policy=resolve_policy(requested_k, drafter=name, ceiling=ceiling),
            drafter=drafter,
            drafter_name=name,
            drafter_failure=failure,
            text=ReplyText(tokenizer.detokenizer()),
        )
        _check_pages(request, limits)
        choices.append(request)
    return choices


def _limit(ids: list[int], params: SamplingParams, limits: Limits) -> int:
    """Return the tokens that a request may emit."""
    room = limits.max_model_len - len(ids)
    if not ids:
        raise RequestError("the prompt must have at least 1 token, got 0", param="prompt")
    if room < 1:
        raise RequestError(
            f"prompt + 1 token must fit the context of {limits.max_model_len}, "
            f"got a prompt of {len(ids)}",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = _integer(params.max_tokens, "max_tokens")
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be >= 1, got {max_tokens}", param="max_tokens")
    return min(max_tokens, room)


def _check_pages(request: Request, limits: Limits) -> None:
    """Refuse what would not even fit an empty pool, and so would wait for ever."""
    if request.max_pages > limits.num_pages:
        raise RequestError(
            f"prompt + max_tokens must fit {limits.num_pages * PAGE_SIZE} tokens of KV, "
            f"got {request.sequence.prompt_len} + {request.limit}",
            param="max_tokens",
            code="kv_capacity_exceeded",
            hint="ask for fewer tokens, or serve with a larger kv_tokens",
        )


def _drafter(make_drafter: Callable[[], Drafter] | None) -> tuple[Drafter | None, str | None]:
    """Return a drafter, or why there is none: a drafter never fails a request."""
    if make_drafter is None:
        return None, None
    try:
        return make_drafter(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".rstrip(": ")


def _k(asked: KSetting | None, own: KSetting, drafter: Drafter | None) -> tuple[KSetting, int]:
    """Return the k setting in force and the largest k that it, engine and drafter allow."""
    ceiling = own if isinstance(own, int) else 0 if own == "off" else MAX_K
    if drafter is not None:
        ceiling = min(ceiling, drafter.max_k)
    try:
        k = own if asked is None else parse_k(asked)
    except ConfigError as error:
        raise RequestError(error.message, param="k") from None
    if isinstance(k, int) and k > ceiling:
        raise RequestError(f"k must be in [0, {ceiling}] here, got {k}", param="k")
    return k, k if isinstance(k, int) else 0 if k == "off" else ceiling


def _seed(asked: int | None) -> int:
    if asked is None:
        return int.from_bytes(os.urandom(8)) >> (64 - DRAWN_SEED_BITS)
    seed = _integer(asked, "seed")
    if not 0 <= seed < 2**64:
        raise RequestError(f"seed must be in [0, 2**64), got {seed}", param="seed")
    return seed


def _ids(values: Iterable[int], param: str, vocab_size: int) -> list[int]:
    ids = [_integer(value, param) for value in values]
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token ids must be in [0, {vocab_size}), got {token_id}", param=param
            )
    return ids


def _integer(value: Any, param: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{param} must be an integer, got {value!r}", param=param) from None
