"""A machine on a virtual clock, to run a policy against: batch 1, no model, no waiting.

A `World` says what rounds cost and what is accepted at a given round and context; it may change
with both. `run` lets a policy play it. Costs and acceptances are drawn from the random generator
that is handed in, so a seed replays a run exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.policy.base import Policy, RoundOutcome, RoundView


@dataclass(frozen=True, kw_only=True)
class World:
    """What rounds cost and yield.

    Attributes:
        forward_s: seconds of a forward by (rows, context_len, round).
        chances: chance of acceptance by position, given the prefix, by round.
        draft_s: seconds of drafting k tokens, by k.
        overhead_s: seconds of every round besides.
        noise: standard deviation of a round's time, as a share.
        ceiling: largest k.
        free: proposals are there before k is chosen, and are scored while k = 0.
        read_s: seconds of each token that a paid drafter reads because it was not asked while it
            came, the prompt included.
    """

    forward_s: Callable[[int, int, int], float]
    chances: Callable[[int], Sequence[float]]
    draft_s: Callable[[int], float] = lambda k: 0.0
    overhead_s: float = 0.0
    noise: float = 0.02
    ceiling: int = 15
    free: bool = False
    read_s: float = 0.0

    def round_s(self, k: int, context_len: int, now: int) -> float:
        """Return the expected seconds of a round."""
        return self.forward_s(k + 1, context_len, now) + self.draft_s(k) + self.overhead_s

    def emitted(self, k: int, now: int) -> float:
        """Return the expected tokens of a round."""
        alive = total = 1.0
        for chance in self.chances(now)[:k]:
            alive *= chance
            total += alive
        return total

    def best(self, context_len: int, now: int = 0) -> tuple[int, float]:
        """Return the best fixed k and its expected tokens a second."""
        rates = [
            self.emitted(k, now) / self.round_s(k, context_len, now)
            for k in range(self.ceiling + 1)
        ]
        k = max(range(self.ceiling + 1), key=rates.__getitem__)
        return k, rates[k]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One simulated round: what was drafted, what came of it, and why."""

    k: int
    emitted: int
    round_s: float
    context_len: int
    reason: str


def run(
    world: World,
    policy: Policy,
    rng: random.Random,
    *,
    num_rounds: int,
    context_len: int = 100,
    request: int = 0,
    start: int = 0,
) -> list[Step]:
    """Let a policy play rounds of one request; rounds are counted from `start`."""
    steps = []
    pending: list[tuple[int, list[bool]]] = []  # proposals to be scored: next index, their hits
    behind = context_len if world.read_s else 0
    for now in range(start, start + num_rounds):
        view = RoundView(
            remaining=1 << 30,
            context_len=context_len,
            proposed=world.ceiling if world.free else 0,
            ceiling=world.ceiling,
            paid_ceiling=0 if world.free else world.ceiling,
            request=request,
            behind=behind,
        )
        decision = policy.choose(view)
        hits = [rng.random() < chance for chance in world.chances(now)[: world.ceiling]]
        accepted = _run_length(hits[: decision.k])
        scores: list[tuple[int, bool]] = []
        if decision.k > 0:
            pending = []
        else:
            shadow = world.ceiling if world.free else decision.shadow
            pending.append((0, hits[:shadow]))
            scores = [(index + 1, hits[index]) for index, hits in pending if index < len(hits)]
            pending = [(index + 1, hits) for index, hits in pending if any(hits[index : index + 1])]
        asked = decision.k or decision.shadow
        caught_up = behind if asked else 0
        draft_s = world.draft_s(asked) + caught_up * world.read_s
        scale = max(0.5, rng.gauss(1.0, world.noise))
        forward_s = scale * world.forward_s(decision.k + 1, context_len, now)
        round_s = forward_s + draft_s + world.overhead_s
        policy.observe(
            RoundOutcome(
                k=decision.k,
                paid=decision.paid,
                accepted=accepted,
                emitted=accepted + 1,
                draft_s=draft_s,
                verify_s=forward_s,
                round_s=round_s,
                request=request,
                context_len=context_len,
                shadow=decision.shadow,
                scores=tuple(scores) if world.free else (),
                shadow_scores=() if world.free else tuple(scores),
                caught_up=caught_up,
            )
        )
        steps.append(
            Step(
                k=decision.k,
                emitted=accepted + 1,
                round_s=round_s,
                context_len=context_len,
                reason=decision.reason,
            )
        )
        context_len += accepted + 1
        behind = 0 if asked or not world.read_s else behind + accepted + 1
    return steps


def _run_length(hits: Sequence[bool]) -> int:
    """Return how many hits there are before the first miss."""
    for index, hit in enumerate(hits):
        if not hit:
            return index
    return len(hits)
