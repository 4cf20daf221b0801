"""What the policy remembers about one running request."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.policy.acceptance import Acceptance, Acceptances
from slipstream.policy.base import RoundOutcome
from slipstream.policy.ledger import RHO_NEIGHBOUR, Ledger

# A shadow whose first token was right makes the next one due this many times sooner.
SHADOW_HURRY = 8


@dataclass(kw_only=True, eq=False, slots=True)
class RequestState:
    """One request's acceptance and budget.

    Attributes:
        acceptance: of what the free drafter offers, and of the paid drafter's drafts.
        neighbour: what drafting in its batch may still cost it.
        k: drafted tokens of its last round.
        changed_at: the policy's round in which its k last changed.
        shadowed_at: the round in which a proposal of its was last scored from its first token.
        hurried: whether that token was right, so that the next shadow is due soon.
        context_len: as last seen.
        started_at: the round in which it began.
    """

    acceptance: Acceptances
    neighbour: Ledger = field(default_factory=lambda: Ledger(rho=RHO_NEIGHBOUR, saved_steps=0.0))
    k: int = 0
    changed_at: int = 0
    shadowed_at: int = -(1 << 30)
    hurried: bool = False
    context_len: int = 0
    started_at: int = 0

    @classmethod
    def start(cls, pairing: Acceptances, now: int) -> RequestState:
        """Return the state of a request that begins in round `now`, from what its pairing knows."""
        known = (Acceptance(each.chances) for each in pairing)
        return cls(acceptance=Acceptances(*known), changed_at=now, started_at=now)

    def follow(self, outcome: RoundOutcome, now: int) -> None:
        """Note where the request is after a round; what it teaches may be learned later."""
        if outcome.k != self.k:
            self.changed_at = now
            self.k = outcome.k
        self.context_len = outcome.context_len + outcome.emitted

    def learn(self, outcome: RoundOutcome, pairing: Acceptances, now: int) -> None:
        """Learn from round `now`, for the request and for its pairing."""
        if outcome.k > 0:
            for known in (self.acceptance, pairing):
                drafter = known.paid if outcome.paid else known.free
                drafter.observe(outcome.k, outcome.accepted, outcome.emitted)
        for scores, is_paid in ((outcome.scores, False), (outcome.shadow_scores, True)):
            if scores:
                self.acceptance[is_paid].score(scores)
                pairing[is_paid].score(scores)
        for position, hit in outcome.shadow_scores:
            if position == 1:
                self.shadowed_at, self.hurried = now, hit

    def shadow_at(self, interval: int, *, dear: bool = False) -> int:
        """Return the round from which on a proposal may be drafted to be scored.

        Args:
            interval: rounds from one to the next.
            dear: it takes more than drafting, so a request that begins has to earn it first.
        """
        wait = max(1, interval // SHADOW_HURRY) if self.hurried else interval
        since = max(self.shadowed_at, self.started_at) if dear else self.shadowed_at
        return since + wait
