"""Asking drafters, at arm's length: what one raises, or makes up, concerns its own request only.

A drafter that fails is dropped for that request; the reply goes on without drafts and its report
says why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

from slipstream.engine.request import Request

Clock = Callable[[], float]

_log = logging.getLogger(__name__)


def ask(request: Request, k: int, clock: Clock, *, vocab_size: int) -> tuple[list[int], float]:
    """Return at most k proposed tokens, cut before the first unknown id, and the seconds taken."""
    began = clock()
    proposed: list[int] = []
    drafter = request.drafter
    if drafter is not None and k > 0:
        try:
            offered = drafter.propose(request.sequence.token_ids, k)
            if offered:
                proposed = _known(offered, k, vocab_size)
        except Exception as error:
            drop(request, error)
    return proposed, clock() - began


def tell(request: Request, drafts: list[int], accepted: int) -> None:
    """Tell the drafter how much of its proposal was accepted."""
    drafter = request.drafter
    if drafter is None or not drafts:
        return
    try:
        drafter.observe(drafts, accepted)
    except Exception as error:
        drop(request, error)


def let_go(request: Request) -> None:
    """Let the drafter forget the sequence."""
    drafter, request.drafter = request.drafter, None
    if drafter is None:
        return
    try:
        drafter.release()
    except Exception as error:
        _log.warning("drafter %s failed to forget a sequence: %r", request.drafter_name, error)


def drop(request: Request, error: Exception) -> None:
    """Go on without the request's drafter, and remember why."""
    _log.warning("drafter %s is dropped for one request: %r", request.drafter_name, error)
    request.drafter_failure = f"{type(error).__name__}: {error}".rstrip(": ")
    let_go(request)


def _known(offered: list[int], k: int, vocab_size: int) -> list[int]:
    known: list[int] = []
    for token_id in map(operator.index, offered[:k]):
        if not 0 <= token_id < vocab_size:
            break
        known.append(token_id)
    return known
