"""What a sequence may draft: what the free drafter offers, or what the paid one would draft.

Each has its own record of acceptance and its own price. Alone in its step a sequence is planned
with both, and the faster plan wins. In a batch, rows are shared out among sequences by survival, so
each must have settled on one before: on that which makes the most of its rows.

A paid drafter that is behind has to read first. That is paid once and serves all rounds that
follow, so a plan spreads it over some of them; the loss budget is asked for all of it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.policy.acceptance import Acceptance, Acceptances
from slipstream.policy.base import RoundView
from slipstream.policy.draft_cost import NOTHING
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost

# Rounds that catching up is spread over, as far as the request's own limit leaves so many. Text
# changes within a few dozen rounds (`SLOW_TRIALS` drafts), so no more are counted on.
CATCH_UP_ROUNDS = 32


class Limits(NamedTuple):
    """Largest k of a round by drafter, 0 where one has nothing to offer."""

    free: int
    paid: int


class Option(NamedTuple):
    """One drafter of a sequence.

    Attributes:
        survival: of shape (K,), the chance that drafts 1 to j are all accepted.
        expected: E[accepted | k], by k from 0.
        limit: largest k.
        draft_times: seconds that drafting k tokens adds, by k from 0.
    """

    survival: Sequence[float]
    expected: Sequence[float]
    limit: int
    draft_times: Sequence[float]
    paid: bool


def options(
    acceptance: Acceptances,
    limits: Limits,
    draft_times: Sequence[float],
    *,
    catch_up_s: float = 0.0,
    remaining: int = 1 << 30,
) -> list[Option]:
    """Return what a sequence may draft, the free drafter's offer first.

    Args:
        draft_times: of the paid drafter.
        catch_up_s: seconds that it reads before it can draft.
        remaining: tokens that the request may still emit.
    """
    found = []
    if limits.free:
        free = acceptance.free
        found.append(Option(free.survival, free.expected, limits.free, NOTHING, False))
    if limits.paid:
        paid = acceptance.paid
        if catch_up_s:
            draft_times = _with_catch_up(draft_times, catch_up_s, remaining, paid)
        found.append(Option(paid.survival, paid.expected, limits.paid, draft_times, True))
    return found


def preferred(
    cost: RoundCost,
    rounds: Sequence[RoundView],
    states: Sequence[RequestState],
    limits: Sequence[Limits],
    rows: int,
    kv_tokens: int,
    token_s: float,
) -> list[Option]:
    """Return the option of each sequence of a batch that gains it the most time.

    Args:
        rows: of the step without drafts.
        token_s: classic seconds of one token.
    """
    num_paid = len([limit for limit in limits if limit.paid])
    draft_times = cost.drafting.times(num_paid) if num_paid else NOTHING
    row_s: float | None = None
    taken = []
    for part, state, limit in zip(rounds, states, limits, strict=True):
        found = options(
            state.acceptance,
            limit,
            draft_times,
            catch_up_s=cost.drafting.catch_up_s(part.behind),
            remaining=part.remaining,
        )
        if len(found) > 1:
            if row_s is None:
                row_s = _row_s(cost, rows, sum([max(each) for each in limits]), kv_tokens)
            found.sort(key=lambda option: -_gain_s(option, token_s, row_s))
        taken.append(found[0] if found else _NOTHING)
    return taken


def better_is_paid(acceptance: Acceptances, limits: Limits, k: int) -> bool:
    """Tell whether the paid drafter is to draft k tokens that will be drafted by either."""
    if not limits.paid or not limits.free:
        return limits.paid > 0
    free, paid = (
        known.expected[min(k, limit)] for known, limit in zip(acceptance, limits, strict=True)
    )
    return paid > free


_NOTHING = Option((), NOTHING, 0, NOTHING, False)


def _with_catch_up(
    draft_times: Sequence[float], catch_up_s: float, remaining: int, acceptance: Acceptance
) -> list[float]:
    """Return draft times with a share of catching up, for the rounds that may still come."""
    return [0.0] + [
        seconds + catch_up_s / max(1.0, min(CATCH_UP_ROUNDS, remaining / (1.0 + expected)))
        for seconds, expected in zip(draft_times[1:], acceptance.expected[1:], strict=True)
    ]


def _gain_s(option: Option, token_s: float, row_s: float) -> float:
    """Return the seconds that an option gains at its best width, as if alone."""
    return max(
        option.expected[k] * token_s - k * row_s - option.draft_times[k]
        for k in range(1, option.limit + 1)
    )


def _row_s(cost: RoundCost, rows: int, count: int, kv_tokens: int) -> float:
    """Return what a drafted row adds to a forward, on average over those that may be drafted."""
    known = [
        (index, seconds)
        for index, seconds in enumerate(cost.forwards_s(rows, count + 1, kv_tokens))
        if seconds is not None
    ]
    if len(known) < 2:
        return 0.0
    (first, low), (last, high) = known[0], known[-1]
    return max(0.0, (high - low) / (last - first))
