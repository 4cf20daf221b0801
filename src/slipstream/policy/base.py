"""The policy interface: a pure decision, one hook that observes.

A policy decides how many tokens a round drafts. It sees only what a view holds, never the engine;
`choose` changes nothing and `observe` is the only mutation, so any recorded run can be replayed
through any policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.types import Verdict


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What is known before a round.

    Attributes:
        remaining: tokens that the request may still emit, >= 1.
        context_len: positions already in the target's KV, anchor excluded.
        proposed: drafted tokens that a free source offers now; 0 for none.
        ceiling: largest k that drafter, context and request allow.
    """

    remaining: int
    context_len: int
    proposed: int
    ceiling: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many tokens to draft, and why. `reason` is never empty."""

    k: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round did.

    Attributes:
        k: tokens drafted and verified; 0 for a classic step.
        accepted: length of the accepted prefix, before any cut.
        emitted: tokens that the request gained; less than accepted + 1 where a stop or a limit cut
            the round.
        draft_s, verify_s, round_s: seconds; round_s runs from round start to round start.
    """

    k: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    round_s: float


class Policy(Protocol):
    """Sizes rounds.

    Attributes:
        mode: "auto", "off" or "fixed:K", as it was asked for.
        verdict, reason: what it decided over all and why; `reason` is never empty.
    """

    @property
    def mode(self) -> str: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def reason(self) -> str: ...

    def choose(self, view: RoundView) -> Decision:
        """Return the next round's k in [0, view.ceiling]. Pure."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in what a round did."""
