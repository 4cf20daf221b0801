"""Recorded pairings as stationary worlds: their arms' costs and acceptances, nothing in between.

A row count that was not recorded costs what the next recorded one does, as padding would have it.
Acceptance is the same at every position, chosen so that the recorded mean comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.policy.simulator import World

# What of a recorded round is drafting was not recorded: a small head takes this share of a classic
# step for a token.
DRAFT_SHARE = 0.04


def world_of(trace: Mapping[str, Any], *, noise: float = 0.02) -> tuple[World, tuple[int, ...]]:
    """Return a trace's world, and its row buckets for the policy."""
    arms = sorted(trace["arms"], key=lambda arm: int(arm["drafted"]))
    costs: dict[int, float] = {1: trace["classic_ms"] / 1e3}
    costs |= {arm["drafted"] + 1: arm["round_ms"] / 1e3 for arm in arms}
    edges = tuple(sorted(costs))
    chances = _chances(arms)

    draft_s = DRAFT_SHARE * costs[1]

    def forward_s(rows: int, context_len: int, now: int) -> float:
        edge = min(edge for edge in edges if edge >= rows)
        return costs[edge] - (edge - 1) * draft_s

    world = World(
        forward_s=forward_s,
        chances=lambda now: chances,
        draft_s=lambda k: k * draft_s,
        noise=noise,
        ceiling=edges[-1] - 1,
    )
    return world, edges


def _chances(arms: list[Mapping[str, Any]]) -> list[float]:
    """Return chances by position that give each arm's mean, narrower arms first."""
    chances: list[float] = []
    for arm in arms:
        wanted, count = arm["accepted_per_round"], arm["drafted"] - len(chances)
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            if _mean_accepted([*chances, *[middle] * count]) < wanted:
                low = middle
            else:
                high = middle
        chances += [(low + high) / 2] * count
    return chances


def _mean_accepted(chances: list[float]) -> float:
    alive, total = 1.0, 0.0
    for chance in chances:
        alive *= chance
        total += alive
    return total
