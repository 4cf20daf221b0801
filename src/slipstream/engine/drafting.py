"""Asking drafters, at arm's length: what one raises, or makes up, concerns its own request only.

A drafter that fails is dropped for that request; the reply goes on without its drafts and its
report says why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import cast

from slipstream.drafters.base import Ask, BatchDrafter, Drafter, Head
from slipstream.engine.request import Request
from slipstream.engine.round import Round

Clock = Callable[[], float]

_log = logging.getLogger(__name__)


def ask(
    request: Request, drafter: Drafter, k: int, clock: Clock, *, vocab_size: int
) -> tuple[list[int], float]:
    """Return at most k proposed tokens and the seconds taken.

    They are cut before the first id that is unknown or that the request's grammar forbids there.
    """
    began = clock()
    proposed: list[int] = []
    if k > 0:
        try:
            offered = drafter.propose(request.sequence.token_ids, k)
            if offered:
                proposed = _known(offered, k, vocab_size)
        except Exception as error:
            drop(request, drafter, error)
    if proposed and request.matcher is not None:
        proposed = request.matcher.allowed_prefix(proposed)
    return proposed, clock() - began


def ask_paid(parts: Sequence[Round], clock: Clock, *, vocab_size: int) -> None:
    """Ask the paid drafters of some rounds for what each wants, those that share a head at once.

    What a head takes is shared out among its rounds.
    """
    together: dict[int, tuple[Head, list[Round]]] = {}
    for part in parts:
        request, head = part.request, head_of(part.request)
        if head is not None:
            together.setdefault(id(head), (head, []))[1].append(part)
        elif request.paid_drafter is not None:
            part.drafted, part.draft_s = ask(
                request, request.paid_drafter, part.wanted, clock, vocab_size=vocab_size
            )
    for head, alike in together.values():
        _ask_head(head, alike, clock, vocab_size)


def head_of(request: Request) -> Head | None:
    """Return what drafts for the request and others in one call, None for nothing."""
    return getattr(request.paid_drafter, "head", None)


def _ask_head(head: Head, parts: Sequence[Round], clock: Clock, vocab_size: int) -> None:
    began = clock()
    try:
        asks = [_ask_of(part) for part in parts]
        read = [ask.drafter.num_read for ask in asks]
        for part, offered in zip(parts, head.propose(asks), strict=True):
            part.drafted = _known(offered, part.wanted, vocab_size)
            matcher = part.request.matcher
            if part.drafted and matcher is not None:
                part.drafted = matcher.allowed_prefix(part.drafted)
        for part, ask, before in zip(parts, asks, read, strict=True):
            part.caught_up = ask.drafter.num_read - before
    except Exception as error:
        for part in parts:
            part.drafted = []
            if part.request.paid_drafter is not None:
                drop(part.request, part.request.paid_drafter, error)
    seconds = (clock() - began) / len(parts)
    for part in parts:
        part.draft_s = seconds


def _ask_of(part: Round) -> Ask:
    request = part.request
    settings = request.sampler.settings()
    return Ask(
        drafter=cast("BatchDrafter", request.paid_drafter),
        token_ids=request.sequence.token_ids,
        k=part.wanted,
        pages=request.sequence.pages,
        chosen=request.chosen,
        temperature=settings.temperature,
        seed=settings.seed,
        choice=settings.choice,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def tell(request: Request, drafter: Drafter | None, drafts: list[int], accepted: int) -> None:
    """Tell the drafter how much of its proposal was accepted."""
    if drafter is None or not drafts:
        return
    try:
        drafter.observe(drafts, accepted)
    except Exception as error:
        drop(request, drafter, error)


def let_go(request: Request) -> None:
    """Let the request's drafters forget the sequence."""
    for drafter in (request.free_drafter, request.paid_drafter):
        if drafter is not None:
            _release(request, drafter)


def drop(request: Request, drafter: Drafter, error: Exception) -> None:
    """Go on without one of the request's drafters, and remember why."""
    _log.warning("drafter %s is dropped for one request: %r", drafter.name, error)
    request.drafter_failure = f"{type(error).__name__}: {error}".rstrip(": ")
    _release(request, drafter)


def _release(request: Request, drafter: Drafter) -> None:
    if drafter is request.free_drafter:
        request.free_drafter = None
    else:
        request.paid_drafter = None
    try:
        drafter.release()
    except Exception as error:
        _log.warning("drafter %s failed to forget a sequence: %r", drafter.name, error)


def _known(offered: list[int], k: int, vocab_size: int) -> list[int]:
    known: list[int] = []
    for token_id in map(operator.index, offered[:k]):
        if not 0 <= token_id < vocab_size:
            break
        known.append(token_id)
    return known
