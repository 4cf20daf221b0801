"""Shares drafted rows out among the sequences of a batch, by their chance of being accepted.

Row after row goes to the draft that is likeliest to survive, over all sequences: a sequence that
copies gets many rows, one that invents gets none. The number of rows that makes the batch fastest
is kept. Cost is a staircase, so the search does not stop at the first row that fails to pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

# Drafts that survive less often than this are not looked at: no row is that cheap.
FAINTEST = 0.02


def share_rows(
    survivals: Sequence[Sequence[float]], limits: Sequence[int], max_rows: int
) -> list[tuple[int, float]]:
    """Return (sequence, survival) of drafted rows, likeliest first.

    Args:
        survivals: of shape (B, K), the chance that drafts 1 to j are all accepted.
        limits: largest k of each sequence.
        max_rows: drafted rows at most.
    """
    order = [
        (index, chance)
        for index, (survival, limit) in enumerate(zip(survivals, limits, strict=True))
        for chance in survival[:limit]
        if chance >= FAINTEST
    ]
    # Survival never rises along a sequence and the sort is stable, so drafts stay in order.
    order.sort(key=itemgetter(1), reverse=True)
    return order[:max_rows]


class Best(NamedTuple):
    """A number of drafted rows, the speedup S of the step and E[accepted] over its sequences."""

    num_rows: int
    speedup: float
    gain: float


def fastest(
    order: Sequence[tuple[int, float]],
    *,
    base_s: float,
    token_s: float,
    times_s: Sequence[float | None],
    fixed_s: float,
    draft_times: Sequence[Sequence[float]],
    bar: float,
    width_margin: float,
) -> tuple[Best, Best]:
    """Return the best number of rows beyond the bar, 0 for none, and the best of all.

    Args:
        base_s: the step without drafts.
        token_s: classic seconds of one token, t_classic(B) / B.
        times_s: seconds of the forward with 1, 2, ... drafted rows; None if unknown.
        fixed_s: seconds of every step besides, lookups included.
        draft_times: of shape (B, K + 1), seconds of drafting k tokens for a sequence.
        bar: the first number of rows must promise more than this; each wider one a margin more.
    """
    chosen = top = 0
    speedup, top_speedup, chosen_gain, top_gain = 1.0, 0.0, 0.0, 0.0
    gain = draft_s = 0.0
    counts: dict[int, int] = {}
    for num_rows, ((index, survival), step_s) in enumerate(zip(order, times_s, strict=True), 1):
        k = counts[index] = counts.get(index, 0) + 1
        gain += survival
        times = draft_times[index]
        draft_s += times[k] - times[k - 1]
        if step_s is None:
            continue
        value = (base_s + gain * token_s) / (step_s + fixed_s + draft_s)
        if value > top_speedup:
            top, top_speedup, top_gain = num_rows, value, gain
        if value > bar:
            chosen, speedup, chosen_gain = num_rows, value, gain
            bar = value * (1.0 + width_margin)
    return Best(chosen, speedup, chosen_gain), Best(top, top_speedup, top_gain)
