"""Keeps a pairing's loss budgets: what each step is worth, what it cost, who pays.

The pairing's own budget is charged with what a step took beyond what the same step without the
policy's drafts is worth. In a batch each request has a second one, which bounds what drafts of its
neighbours may cost it. Steps that have nothing to teach are added up and accounted for together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slipstream.policy.base import StepOutcome
from slipstream.policy.cost import octave_of
from slipstream.policy.ledger import Ledger, held_up_s
from slipstream.policy.quiet import Quiet
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.policy.terms import Terms

# Where lookups, or choices that come to nothing, take more than the leak gives, they are made less
# often while more than this share of the budget is owed, so that a round can still start.
REST_SHARE = 0.5
# What lookups may take of the leak then, and what such choices may: the rest pays what is owed, and
# what a step costs that passes by.
PEEK_SHARE = 0.25
DECIDE_SHARE = 0.25


class Accounts:
    """Charges steps.

    Attributes:
        last: the step that was looked at in full, while no step has passed by since.
    """

    def __init__(self, cost: RoundCost, ledger: Ledger) -> None:
        self._cost = cost
        self._ledger = ledger
        self._quiet = Quiet()
        self._deciding_s = 0.0  # spent since widths were last chosen
        self._drafted = False  # whether the last step that was charged did
        self.last: StepOutcome | None = None

    def charge(
        self,
        outcome: StepOutcome,
        requests: Mapping[int, RequestState],
        terms: Terms | None,
        expected_s: float | None,
    ) -> None:
        """Account for a step by what classic steps would have taken for its tokens.

        Args:
            terms: that cover the step; None where there are none.
            expected_s: what such a step takes, None where that is not known.
        """
        rounds = outcome.rounds
        before_s = 0.0 if outcome.choose_s > 0.0 else self._deciding_s
        self._deciding_s = before_s + outcome.choose_s + outcome.observe_s
        self._drafted = False
        if terms is None:
            worth = self._worth(outcome)
            if worth is None:
                return  # nothing drafts before a classic step was timed
            classic_s, base_s, fixed_s = worth
            if outcome.caught_up:  # how long that takes is known too roughly to blame the machine
                expected_s = None
        else:
            classic_s = base_s = terms.value_s
            fixed_s = 0.0
        drafted, gained = False, 0
        for part in rounds:
            if not part.fixed:
                gained += part.emitted - 1
                drafted = drafted or part.k > 0
        value_s = base_s + classic_s / len(rounds) * gained
        if drafted:
            self._drafted = True
            held_s = 0.0 if expected_s is None else held_up_s(outcome.round_s, expected_s)
            self._ledger.charge(
                round_s=outcome.round_s, value_s=value_s, classic_s=classic_s, held_s=held_s
            )
            took_s = 0.0
        else:
            # A classic step is worth what it took, however wrong the estimate is.
            lost_s = outcome.spent_s - min(fixed_s, outcome.draft_s)
            took_s = max(outcome.round_s - lost_s, 0.0)
            self._ledger.leak(value_s=min(value_s, took_s), lost_s=lost_s)
            held_s = held_up_s(took_s, value_s)
            self._ledger.forgive(round_s=took_s, held_s=held_s, value_s=value_s)
        if len(rounds) == 1:
            return
        shared_s = base_s - classic_s  # what the rows that ride along are worth to everybody
        for part in rounds:
            budget = requests[part.request].neighbour
            if drafted:
                worth_s = shared_s + classic_s * part.emitted
                budget.charge(
                    round_s=outcome.round_s, value_s=worth_s, classic_s=classic_s, held_s=held_s
                )
            else:
                budget.leak(value_s=classic_s)
                budget.forgive(round_s=took_s, held_s=held_s, value_s=base_s)

    def _worth(self, outcome: StepOutcome) -> tuple[float, float, float] | None:
        """Return lower bounds of a classic step and of the step without the policy's drafts.

        Also what drafting fixed widths takes, which is in the latter; None while nothing is known.
        """
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        classic_s = self._cost.value_s(batch, kv)
        if classic_s is None:
            return None
        riding, fixed_s = outcome.riding_rows, 0.0
        base_s = self._cost.step_value_s(batch, riding, kv, outcome.prefill_kv, classic_s)
        if riding or outcome.fixed_caught_up:
            drafting = self._cost.drafting
            fixed_s = drafting.drafting_s(outcome.fixed_drafts)
            fixed_s += drafting.catch_up_s(outcome.fixed_caught_up)
        return classic_s, base_s + fixed_s, fixed_s

    def terms(self, outcome: StepOutcome) -> Terms | None:
        """Return what holds for steps like one until more is learned; None if not known yet."""
        if outcome.riding_rows:
            return None
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        level = self._cost.classic.level(batch, kv)
        classic_s = self._cost.classic.time_s(batch, kv)
        value_s = self._cost.value_s(batch, kv)
        if not self._cost.knows_classic(batch, kv) or not (level and classic_s and value_s):
            return None
        return Terms(
            [part.request for part in outcome.rounds],
            1 << octave_of(kv),
            classic_s=classic_s,
            value_s=value_s,
            classic_seen_at=level.seen_at,
            is_settled=not level.strays,
            cost=self._cost,
        )

    @property
    def num_waiting(self) -> int:
        """Steps that passed by and are not accounted for."""
        return self._quiet.count

    def is_strained(self, outcome: StepOutcome, terms: Terms) -> bool:
        """Tell whether lookups and choosing took more than what is owed leaves room for."""
        asked_s = outcome.peek_s + outcome.choose_s
        if self._ledger.debt_s <= 0.0 or asked_s <= 0.0:
            return False
        return asked_s > self._ledger.room_s(terms.classic_s, REST_SHARE)

    def peek_every(self, outcome: StepOutcome, terms: Terms | None) -> int:
        """Return in how many steps a free drafter is asked once.

        In every one while the budget has room, or a part of the leak pays for it; else so seldom
        that it does. It is never left alone altogether: what one cold lookup took would else be
        believed for ever.
        """
        if self._ledger.debt_s <= 0.0:
            return 1
        peek_s = self._cost.drafting.peek_s(len(outcome.rounds))
        return self._every(self._classic_s(outcome, terms), peek_s, PEEK_SHARE)

    def decide_every(self, outcome: StepOutcome, terms: Terms | None) -> int:
        """Return in how many steps widths are chosen once, as far as there is something to draft.

        In every one while the budget has room, or the leak pays for it, or the last choice was to
        draft, for then the budget has allowed the round with all that it takes; else so seldom that
        a part of the leak pays for what a choice that comes to nothing takes, the scoring of what
        was offered included.
        """
        if self._drafted or self._ledger.debt_s <= 0.0:
            return 1
        decide_s = self._cost.drafting.decide_s(len(outcome.rounds))
        classic_s = self._classic_s(outcome, terms)
        return self._every(classic_s, decide_s, DECIDE_SHARE, max(decide_s, self._deciding_s))

    def _classic_s(self, outcome: StepOutcome, terms: Terms | None) -> float | None:
        if terms is not None:
            return terms.classic_s
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        return self._cost.classic_s(batch, kv)

    def _every(
        self, classic_s: float | None, asking_s: float, share: float, really_s: float = 0.0
    ) -> int:
        """Return in how many steps something that takes `asking_s` may be done once.

        Args:
            classic_s: a classic step, None if it is not known.
            share: of the leak that pays for it where the budget has no room.
            really_s: what it took the last time with all that followed, if that is known.
        """
        if classic_s is None:
            return 1
        leak_s = self._ledger.rho * classic_s
        if asking_s <= max(self._ledger.room_s(classic_s, REST_SHARE), share * leak_s):
            return 1
        return math.ceil(max(asking_s, really_s) / (share * leak_s))

    def pass_by(
        self,
        requests: Sequence[int],
        kv_tokens: int,
        *,
        asked_s: float,
        spent_s: float,
        round_s: float,
    ) -> bool:
        """Add a classic step to those that passed by; False if it should be looked at in full."""
        if self.last is not None:
            self._start_quiet(self.last)
            self.last = None
        return self._quiet.add(
            requests, kv_tokens, asked_s=asked_s, spent_s=spent_s, round_s=round_s
        )

    def settle(self, requests: Mapping[int, RequestState]) -> int:
        """Account for the steps that passed by and return how many there were."""
        quiet, count = self._quiet, self._quiet.count
        if not count:
            return 0
        value_s = count * quiet.value_s
        self._ledger.leak(value_s=min(value_s, quiet.classic_s), lost_s=quiet.spent_s)
        self._ledger.forgive(round_s=quiet.classic_s, held_s=quiet.held_s, value_s=quiet.value_s)
        if len(quiet.requests) > 1:
            for number in quiet.requests:
                if number in requests:
                    budget = requests[number].neighbour
                    budget.leak(value_s=value_s)
                    budget.forgive(
                        round_s=quiet.classic_s, held_s=quiet.held_s, value_s=quiet.value_s
                    )
        quiet.clear()
        return count

    def _start_quiet(self, outcome: StepOutcome) -> None:
        """Let steps like this one pass by, if what they are worth is known."""
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        value_s = None
        if outcome.prefill_rows == 0 and self._cost.knows_classic(batch, kv):
            value_s = self._cost.value_s(batch, kv)
        classic_s = value_s or 0.0
        self._quiet.start(
            outcome,
            value_s,
            room_s=self._ledger.room_s(classic_s, REST_SHARE),
            leak_s=self._ledger.rho * classic_s,
        )
