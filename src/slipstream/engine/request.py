"""One request: checked once when it comes in, then carried through its rounds."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.config import parse_k
from slipstream.drafters.base import Drafter
from slipstream.engine.sequence import TokenSequence
from slipstream.engine.stats import ReplyStats
from slipstream.errors import ConfigError, RequestError
from slipstream.policy.base import Policy
from slipstream.policy.fixed import resolve_policy
from slipstream.types import MAX_K, FinishReason, KSetting, SamplingParams

# JSON readers that keep numbers as doubles lose digits beyond this.
DRAWN_SEED_BITS = 53


class Detokenizer(Protocol):
    """Turns ids into text as they come, holding back broken characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final."""

    def finish(self) -> str:
        """Return what was held back."""


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
        k: the engine's own k setting; a request may only lower it.
        model_stop_ids: ids that end a reply unless the request ignores them.
    """

    vocab_size: int
    max_model_len: int
    k: KSetting
    model_stop_ids: frozenset[int]


@dataclass(kw_only=True, eq=False)
class Request:
    """A request on its way.

    Attributes:
        limit: tokens it may emit, its own limit and the context's room considered.
        k_ceiling: largest k that engine, drafter and request allow.
        text: what was detokenized so far, in pieces.
    """

    id: int
    sequence: TokenSequence
    limit: int
    stop_ids: frozenset[int]
    seed: int
    requested_k: KSetting
    k_ceiling: int
    policy: Policy
    drafter: Drafter | None
    detokenizer: Detokenizer
    stats: ReplyStats = field(default_factory=ReplyStats)
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.limit - self.sequence.num_generated

    @property
    def drafter_name(self) -> str:
        """The drafter's name, "none" without one."""
        return self.drafter.name if self.drafter else "none"

    def append_text(self, emitted: list[int]) -> str:
        """Detokenize a round's ids, a stop id excepted, and return the text that became final."""
        stopped = self.finish_reason == "stop"
        piece = self.detokenizer.push(emitted[:-1] if stopped else emitted)
        if self.finish_reason is not None:
            piece += self.detokenizer.finish()
        self.text.append(piece)
        return piece


def make_request(
    request_id: int,
    prompt_ids: Iterable[int],
    params: SamplingParams,
    *,
    limits: Limits,
    tokenizer: Tokenizer,
    make_drafter: Callable[[], Drafter] | None,
) -> Request:
    """Check everything that a caller can get wrong, and return the request.

    Raises:
        RequestError: a field is out of range; `param` names it.
    """
    ids = _ids(prompt_ids, "prompt", limits.vocab_size)
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
    if not params.temperature == 0:  # NaN too
        raise RequestError(
            f"temperature must be 0, got {params.temperature}: only greedy is available in this "
            "version",
            param="temperature",
        )
    stops = frozenset(_ids(params.stop_token_ids, "stop_token_ids", limits.vocab_size))
    drafter = make_drafter() if make_drafter else None
    requested_k, ceiling = _k(params.k, limits.k, drafter)
    return Request(
        id=request_id,
        sequence=TokenSequence(ids),
        limit=min(max_tokens, room),
        stop_ids=stops if params.ignore_eos else stops | limits.model_stop_ids,
        seed=_seed(params.seed),
        requested_k=requested_k,
        k_ceiling=ceiling,
        policy=resolve_policy(
            requested_k, drafter=drafter.name if drafter else "none", ceiling=ceiling
        ),
        drafter=drafter,
        detokenizer=tokenizer.detokenizer(),
    )


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
