"""A loss budget: what drafting may cost over any stretch of time, whatever happens.

A leaky bucket of debt in seconds. A round that drafts adds what it took beyond the classic value
of what it emitted; every round leaks a small share of what it emitted. What drafting gained pays
for debt, and a few classic steps of it are saved: what was gained may be risked again, no more, so
a good morning cannot pay for a bad afternoon. A round may draft only if its worst case still fits.
docs/policy.md states the bound that follows and proves it.

It knows nothing of estimates: it is told raw seconds, and holds whatever the estimates are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.policy.level import CLAMP

# Share of classic time that drafting may lose for ever. Together with the 0.3 % that k = 0 may
# differ from an engine without a drafter it makes the promised 1 %.
RHO = 0.007
# Capacity in classic steps: enough for the verify of sixteen rows that costs half of what sixteen
# steps cost, and lost at once it is 1 % of 800 tokens.
CAPACITY_STEPS = 8.0
# Gains that are kept, in classic steps. A hiccup of 30 ms, a dozen steps of a small model, is more
# than the capacity, and without savings ends drafting for hundreds of steps that would have gained;
# with them the next dozen rounds win it back.
SAVED_STEPS = 32.0
# The same share for one request among others: what neighbours' drafts may cost it.
RHO_NEIGHBOUR = 0.05
# What a classic step takes beyond this many times its worth is held against the machine: it is what
# the estimator does not let a sample count for, so that v knows nothing of it.
HELD_UP = CLAMP
# Most that one held-up classic step forgives, in times of what it lost itself: classic steps are
# rare where drafting pays, and one of them would else speak for hours.
MOST_FORGIVEN = 4.0
# Forgiveness that nothing was owed for yet is kept for later hiccups, up to so many classic steps.
BANKED_STEPS = 16.0
# Steps of either kind that are taken to have been run before the first: a hiccup among the first
# few rounds says as little about drafting as none.
PRIOR_STEPS = 256


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Debt of a pairing, or of one request in a batch.

    Attributes:
        rho: share of emitted value that leaks away with every round.
        capacity_steps: A, in classic steps.
        saved_steps: S, the most that is kept of gains, in classic steps.
        debt_s: seconds lost and not yet leaked; kept with the pairing's profile.
        saved_s: seconds gained and kept; nothing is owed then.
        net_s: seconds lost beyond classic decoding since it was made, gains taken off: what a
            report shows, and nothing is decided by.
        value_s: classic value of everything that was emitted in that time.
        forgiven_s: debt taken back for what the machine itself lost; see `forgive`.
        banked_s: what the machine was seen to lose and no debt was taken back for yet.
        drafting_s, classic_s: seconds of rounds that drafted, and of those that did not.
    """

    rho: float = RHO
    capacity_steps: float = CAPACITY_STEPS
    saved_steps: float = SAVED_STEPS
    debt_s: float = 0.0
    saved_s: float = 0.0
    net_s: float = 0.0
    value_s: float = 0.0
    forgiven_s: float = 0.0
    banked_s: float = 0.0
    drafting_s: float = 0.0
    classic_s: float = 0.0

    def may_start(self, *, worst_s: float, anchors_s: float, classic_s: float) -> bool:
        """Tell whether a round that drafts may start.

        Args:
            worst_s: the longest that it may take.
            anchors_s: classic value of the one token that each of its sequences gains at least.
            classic_s: a classic step, the unit of the capacity.
        """
        allowed_s = self.capacity_steps * classic_s + self.saved_s
        return self.debt_s + (worst_s - anchors_s) <= allowed_s

    def charge(
        self, *, round_s: float, value_s: float, classic_s: float, held_s: float = 0.0
    ) -> None:
        """Account for a round that drafted.

        Args:
            round_s: raw seconds that it took, hiccups included.
            value_s: classic value of all that it emitted.
            classic_s: a classic step, the unit of what is saved.
            held_s: how long it was held up, beyond what it was expected to take.
        """
        self.drafting_s += round_s
        lost_s = round_s - value_s
        surplus_s = -self._add(lost_s, value_s)
        gained_s = min(surplus_s, -lost_s)  # what leaks away is no gain
        if gained_s > 0.0:
            self.saved_s = min(self.saved_s + gained_s, self.saved_steps * classic_s)
        # What is saved pays first; it comes back with the next gains, what is banked does not.
        if held_s > 0.0 and self.banked_s > 0.0:
            taken_s = min(self.debt_s, self.banked_s, held_s)
            self.banked_s -= taken_s
            self.debt_s -= taken_s
            self.forgiven_s += taken_s

    def leak(self, *, value_s: float, lost_s: float = 0.0) -> None:
        """Account for a classic step.

        Args:
            value_s: classic value of what it emitted.
            lost_s: what it spent on drafting all the same, for proposals that are only scored.
        """
        self._add(lost_s, value_s)

    def forgive(self, *, round_s: float, held_s: float, value_s: float) -> None:
        """Account for what classic steps show the machine to lose by itself.

        Rounds that draft are charged what the machine itself loses in them, and classic steps are
        not, though it loses as much there, and v leaves it out. So what classic steps are held up
        is taken off the debt, once for each second of drafting beside a second of classic steps: on
        average that is what drafting was charged for it. Where classic steps run smoothly nothing
        is ever forgiven.

        Args:
            round_s: raw seconds of classic steps, what drafters and policy spent excepted.
            held_s: how much of it they were held up, see `held_up_s`.
            value_s: what one of them is worth.
        """
        self.classic_s += round_s
        if held_s <= 0.0:
            return
        prior_s = PRIOR_STEPS * value_s
        share = min((self.drafting_s + prior_s) / (self.classic_s + prior_s), MOST_FORGIVEN)
        taken_s = min(self.debt_s, share * held_s)
        self.debt_s -= taken_s
        self.forgiven_s += taken_s
        self.banked_s = min(self.banked_s + share * held_s - taken_s, BANKED_STEPS * value_s)

    @property
    def balance_s(self) -> float:
        """What is owed, below 0 what is saved."""
        return self.debt_s - self.saved_s

    def owed(self, classic_s: float) -> str:
        """Return the debt beside what may be owed in words, e.g. "12.3 of 21.6 ms"."""
        allowed_s = self.capacity_steps * classic_s + self.saved_s
        return f"{1e3 * self.debt_s:.1f} of {1e3 * allowed_s:.1f} ms"

    def room_s(self, classic_s: float, share: float) -> float:
        """Return the seconds that may be lost before so much of the capacity is owed."""
        return share * self.capacity_steps * classic_s + self.saved_s - self.debt_s

    def _add(self, lost_s: float, value_s: float) -> float:
        """Take a loss from what is saved, the rest as debt; return the debt, below 0 a surplus."""
        self.net_s += lost_s
        self.value_s += value_s
        change_s = lost_s - self.rho * value_s
        if change_s > 0.0:
            paid_s = min(self.saved_s, change_s)
            self.saved_s -= paid_s
            change_s -= paid_s
        owed_s = self.debt_s + change_s
        self.debt_s = max(0.0, owed_s)
        return owed_s


def held_up_s(round_s: float, value_s: float) -> float:
    """Return how long a classic step was held up, from its seconds and what it is worth.

    Example: a step worth 4 ms that took 30 was held up 25 of them, one that took 5 was not.
    """
    return max(0.0, round_s - HELD_UP * value_s) if value_s > 0.0 else 0.0
