"""Asking drafters, at arm's length: what one raises, or makes up, concerns its own request only.

A drafter that fails is dropped for that request; the reply goes on without its drafts and its
report says why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

from slipstream.drafters.base import Drafter
from slipstream.engine.request import Request

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
