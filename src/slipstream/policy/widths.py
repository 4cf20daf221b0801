"""Shares drafted rows out among the sequences of a batch, by their chance of being accepted.

Row after row goes to the draft that is likeliest to survive, over all sequences: a sequence that
copies gets many rows, one that invents gets none. The number of rows that makes the batch fastest
is kept. Cost is a staircase, so the search does not stop at the first row that fails to pay.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
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
    heap = [
        (-survival[0], index, 0)
        for index, (survival, limit) in enumerate(zip(survivals, limits, strict=True))
        if limit > 0 and survival[0] >= FAINTEST
    ]
    heapq.heapify(heap)
    order: list[tuple[int, float]] = []
    while heap and len(order) < max_rows:
        faint, index, position = heap[0]
        order.append((index, -faint))
        position += 1
        if position < limits[index] and survivals[index][position] >= FAINTEST:
            heapq.heapreplace(heap, (-survivals[index][position], index, position))
        else:
            heapq.heappop(heap)
    return order


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
    time_of: Callable[[int], float | None],
    draft_times: Sequence[float],
    bar: float,
    width_margin: float,
) -> tuple[Best, Best]:
    """Return the best number of rows beyond the bar, 0 for none, and the best of all.

    Args:
        base_s: the step without drafts.
        token_s: classic seconds of one token, t_classic(B) / B.
        time_of: seconds of the step with so many drafted rows, drafting excluded; None if unknown.
        draft_times: seconds of drafting k tokens for one sequence, index k.
        bar: the first number of rows must promise more than this; each wider one a margin more.
    """
    chosen, top = Best(0, 1.0, 0.0), Best(0, 0.0, 0.0)
    gain = draft_s = 0.0
    counts: dict[int, int] = {}
    for num_rows, (index, survival) in enumerate(order, 1):
        k = counts[index] = counts.get(index, 0) + 1
        gain += survival
        draft_s += draft_times[k] - draft_times[k - 1]
        step_s = time_of(num_rows)
        if step_s is None:
            continue
        value = (base_s + gain * token_s) / (step_s + draft_s)
        if value > top.speedup:
            top = Best(num_rows, value, gain)
        if value > bar:
            chosen = Best(num_rows, value, gain)
            bar = value * (1.0 + width_margin)
    return chosen, top
