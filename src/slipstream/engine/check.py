"""Everything that a caller can get wrong about a request, checked once, before anything runs."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.config import k_ceiling, parse_k
from slipstream.drafters.base import Drafter
from slipstream.drafters.prediction import PredictedText
from slipstream.engine.grammar import Grammars, Vocabulary
from slipstream.engine.pairing import Pairing
from slipstream.engine.request import Request
from slipstream.engine.sampling import PickKernel, Sampler, validate_sampling
from slipstream.engine.sequence import TokenSequence
from slipstream.engine.sources import free_sources
from slipstream.engine.text import Detokenizer, ReplyText
from slipstream.errors import ConfigError, RequestError
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.types import MAX_K, KSetting, SamplingParams

# JSON readers that keep numbers as doubles lose digits beyond this.
DRAWN_SEED_BITS = 53


class Tokenizer(Vocabulary, Protocol):
    """What the engine asks of a model's tokenizer."""

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one reply."""

    def has_more_ids(self, text: str, limit: int) -> int:
        """Return how many ids a text certainly has, where that is beyond a limit, else 0."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine can serve.

    Attributes:
        vocab_size: ids are below it.
        max_model_len: prompt and output tokens together.
        num_pages: KV pages of the whole pool.
        k: the engine's own k setting; a request may only lower it.
        max_k: most drafted tokens a round, whatever k is.
        model_stop_ids: ids that end a reply unless the request ignores them.
        steps_sample: a step chooses sampled tokens itself where its logits alone decide.
    """

    vocab_size: int
    max_model_len: int
    num_pages: int
    k: KSetting
    model_stop_ids: frozenset[int]
    steps_sample: bool = False
    max_k: int = MAX_K


def check_request(
    request_id: int,
    prompt_ids: Iterable[int],
    params: SamplingParams,
    *,
    limits: Limits,
    tokenizer: Tokenizer,
    pairing: Pairing,
    numbers: Iterator[int],
    kernel: PickKernel,
    grammars: Grammars,
) -> list[Request]:
    """Check a request and return its choices; a grammar is compiled here.

    Args:
        numbers: yields a number of its own for every choice.

    Raises:
        RequestError: a field is out of range; `param` names it.
    """
    ids = _ids(prompt_ids, limits.vocab_size)
    validate_sampling(params, vocab_size=limits.vocab_size)
    limit = _limit(ids, params, limits)
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= limits.model_stop_ids
    seed = _drawn_seed() if params.seed is None else params.seed
    bad_words = _bad_words(params.bad_words, tokenizer)
    may_draft = pairing.policy is not None and params.k not in ("off", 0)
    predicted = _predicted(params.prediction, tokenizer) if may_draft else None
    choices = []
    for choice in range(params.n):
        drafters, failure = _drafters(pairing.make_drafters)
        number = next(numbers)
        requested_k, ceiling = _k(params, limits, drafters)
        matcher = grammars.matcher(params.grammar, stop_ids) if params.grammar else None
        free = next((each for each in drafters if each.free), None)
        paid = next((each for each in drafters if not each.free), None)
        if drafters and may_draft:
            free = free_sources(free, matcher, predicted, len(ids))
        name = "+".join(each.name for each in (free, paid) if each is not None) or "none"
        sampler = Sampler(
            params,
            vocab_size=limits.vocab_size,
            seed=seed,
            choice=choice,
            stop_ids=stop_ids,
            bad_words_ids=bad_words,
            kernel=kernel,
        )
        by_step = sampler.is_argmax or (limits.steps_sample and sampler.is_plain)
        by_step = by_step and matcher is None
        request = Request(
            id=request_id,
            number=number,
            choice=choice,
            sequence=TokenSequence(ids),
            limit=limit,
            stop_ids=stop_ids,
            seed=seed,
            requested_k=requested_k,
            k_ceiling=ceiling,
            fixed_k=None if requested_k == "auto" and ceiling else ceiling,
            policy=pairing.policy_of(number, requested_k, drafter=name, ceiling=ceiling),
            free_drafter=free,
            paid_drafter=paid,
            drafter_name=name,
            drafter_failure=failure,
            sampler=sampler,
            history=None if by_step else sampler.history(ids, matcher),
            min_tokens=params.min_tokens,
            reports_logprobs=params.logprobs is not None,
            num_choices=params.n,
            text=ReplyText(tokenizer.detokenizer(), params.stop),
        )
        choices.append(request)
    _check_pages(choices[0], limits)
    return choices


def _limit(ids: list[int], params: SamplingParams, limits: Limits) -> int:
    """Return the tokens that a request may emit."""
    room = limits.max_model_len - len(ids)
    if not ids:
        raise RequestError("the prompt must have at least 1 token, got 0", param="prompt")
    if room < 1:
        raise too_long(str(len(ids)), limits.max_model_len)
    return min(operator.index(params.max_tokens), room)


def too_long(num_tokens: str, max_len: int) -> RequestError:
    """Return the refusal of a prompt of so many tokens."""
    return RequestError(
        f"prompt + 1 token must fit the context of {max_len}, got a prompt of {num_tokens}",
        param="prompt",
        code="context_length_exceeded",
    )


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


def _drafters(
    make_drafters: Sequence[Callable[[], Drafter]],
) -> tuple[list[Drafter], str | None]:
    """Return drafters, and why one is missing: a drafter never fails a request."""
    drafters, failure = [], None
    for make_drafter in make_drafters:
        try:
            drafters.append(make_drafter())
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".rstrip(": ")
    return drafters, failure


def _k(params: SamplingParams, limits: Limits, drafters: Sequence[Drafter]) -> tuple[KSetting, int]:
    """Return the k setting in force and the largest k that it, engine and drafters allow."""
    asked, ceiling = params.k, min(k_ceiling(limits.k), limits.max_k)
    if drafters:
        ceiling = min(ceiling, max(drafter.max_k for drafter in drafters))
    if params.max_k is not None:
        if not 0 <= params.max_k <= ceiling:
            raise RequestError(
                f"max_k must be in [0, {ceiling}] here, got {params.max_k}", param="max_k"
            )
        ceiling = params.max_k
    try:
        k = limits.k if asked is None else parse_k(asked)
    except ConfigError as error:
        raise RequestError(error.message, param="k") from None
    if isinstance(k, int) and k > ceiling:
        raise RequestError(
            f"k must be in [0, {ceiling}] here, got {k}",
            param="k",
            hint="a request may only lower the engine's own k",
        )
    return k, min(ceiling, k_ceiling(k))


def _drawn_seed() -> int:
    return int.from_bytes(os.urandom(8)) >> (64 - DRAWN_SEED_BITS)


def _predicted(text: str | None, tokenizer: Tokenizer) -> PredictedText | None:
    """Return a prediction's tokens, without what is put before any text."""
    if not text:
        return None
    begins = len(tokenizer.encode("", parse_special=False))
    try:
        return PredictedText(tokenizer.encode(text, parse_special=False)[begins:])
    except RequestError as error:
        raise RequestError(error.message, param="prediction", code=error.code) from None


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return words as ids, as they begin a text, as they follow a space, and something else.

    The last is another spelling where encoding puts a space in front of a text, as SentencePiece's
    vocabularies do.
    """
    if not words:
        return []
    spelled: dict[tuple[int, ...], None] = {}  # a set that keeps their order
    for word in words:
        for lead, text in (("", word), ("", " " + word.lstrip(" ")), ("\n", word)):
            before = tokenizer.encode(lead, parse_special=False)
            ids = tokenizer.encode(lead + text, parse_special=False)
            if ids[: len(before)] == before and len(ids) > len(before):
                spelled[tuple(ids[len(before) :])] = None
    return list(spelled)


def _ids(values: Iterable[int], vocab_size: int) -> list[int]:
    ids = [_integer(value) for value in values]
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token ids must be in [0, {vocab_size}), got {token_id}", param="prompt"
            )
    return ids


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RequestError(
            f"a prompt's token ids must be integers, got {value!r}", param="prompt"
        ) from None
