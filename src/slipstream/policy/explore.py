"""Trying what might be better: widths now and then, and proposals that are only scored.

A width is tried if it would win under the kindest reading of what is known: every chance of
acceptance a standard error higher, a row bucket that was never run as cheap as its narrower
neighbour. The ledger pays, so what exploration costs is bounded with everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.policy.base import RoundView, StepView
from slipstream.policy.estimate import LEAVE_MARGIN, WIDTH_MARGIN
from slipstream.policy.ledger import Ledger
from slipstream.policy.options import Limits, Option, preferred
from slipstream.policy.plan import Plan, make_plan, widths_of
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.policy.widths import fastest, share_rows

# Rounds between two trials of a width: a trial loses half a round at worst where drafting pays,
# and one in 64 is then below one percent.
PROBE_EVERY = 64
# The same as long as row counts are unmeasured: there are few, and each trial settles one.
PROBE_UNMEASURED_EVERY = 8
# A trial must promise this much more than what runs now.
PROBE_MARGIN = 0.02
# An unmeasured row count may be this many times the widest measured one.
WIDEN = 2
# After this many rounds a cost may have become this much lower: a device that cooled.
STALE_ROUNDS = 1024
STALE_DISCOUNT = 0.8
# Half of the leak goes to shadows, the other half to trials and to bad luck.
SHADOW_SHARE = 0.5
# Rounds between shadows while a drafter's time is unknown.
SHADOW_UNTIMED = 64
# The same where nothing is owed and a drafter has to read first. The longer it is left alone the
# more it has to read, so half of the leak may never pay for it: then the budget does, of which at
# least half is left, and all of the leak pays that back.
SHADOW_READING = 64


class Explorer:
    """Decides about trials; keeps nothing itself."""

    def __init__(self, cost: RoundCost, ledger: Ledger) -> None:
        self._cost = cost
        self._ledger = ledger

    def probe(
        self,
        plan: Plan,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        kv_tokens: int,
        now: int,
        *,
        explored: bool = True,
    ) -> Plan | None:
        """Return a plan that might be better than what runs now; None if none is due.

        Args:
            explored: enough is known of how often drafts are right. A drafter that has to read
                first is too dear to be shadowed; it is tried, and soon, before it has fallen
                behind so far that the budget does not allow it.
        """
        waited = now - max([state.changed_at for state in states])
        if waited == 0 or waited % PROBE_UNMEASURED_EVERY or view.riding_rows:
            return None
        verify, batch = self._cost.verify, len(states)
        if waited < self.probe_after(batch, limits, explored=explored):
            return None
        taken = self._options(plan, view, states, limits, batch, kv_tokens)
        num_rows = sum([option.limit for option in taken])
        order = share_rows(
            [
                state.acceptance[option.paid].optimistic()
                for state, option in zip(states, taken, strict=True)
            ],
            [option.limit for option in taken],
            num_rows if view.max_draft_rows is None else view.max_draft_rows,
        )
        fixed_s = self._cost.overhead_s + self._cost.drafting.peek_s(batch)
        widest = WIDEN * verify.widest

        def time_of(live_rows: int) -> float | None:
            rows = self._cost.padded(live_rows)
            forward_s = verify.time_s(rows, kv_tokens)
            if forward_s is None:
                forward_s = verify.least_s(rows, kv_tokens) if rows <= widest else None
            elif now - (verify.seen_at(rows) or 0) > STALE_ROUNDS:
                forward_s = max(STALE_DISCOUNT * forward_s, min(forward_s, plan.base_s))
            elif waited < PROBE_EVERY and explored:
                return None
            return forward_s

        bar = (1.0 + PROBE_MARGIN) * plan.top.speedup if plan.num_rows else 1.0 + LEAVE_MARGIN
        chosen, _ = fastest(
            order,
            base_s=plan.base_s,
            token_s=plan.token_s,
            times_s=[time_of(batch + num_rows) for num_rows in range(1, len(order) + 1)],
            fixed_s=fixed_s,
            draft_times=[option.draft_times for option in taken],
            bar=bar,
            width_margin=WIDTH_MARGIN,
        )
        if chosen.num_rows in (0, plan.num_rows):
            return None
        widths = widths_of(order[: chosen.num_rows], batch)
        return make_plan(
            self._cost,
            view,
            widths,
            [option.paid for option in taken],
            chosen,
            chosen,
            plan.base_s,
            plan.classic_s,
            kv_tokens,
        )

    def shadow(
        self,
        plan: Plan,
        state: RequestState,
        limit: int,
        kv_tokens: int,
        now: int,
        *,
        behind: int = 0,
    ) -> int:
        """Return how many tokens a paid drafter should draft to be scored, 0 for none.

        Args:
            behind: tokens that it has to read first.
        """
        k = min(limit, max(1, plan.top.num_rows // plan.batch))
        if k == 0:
            return 0
        if now < self._shadow_at(plan, state, k, behind, owes=self._ledger.debt_s > 0.0):
            return 0
        if plan.batch == 1 and not self.could_pay(plan, limit, kv_tokens):
            return 0
        return k if self._ledger.debt_s <= self._left_s(plan, k, behind) else 0

    def shadow_from(
        self,
        plan: Plan,
        rounds: Sequence[RoundView],
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        kv_tokens: int,
        *,
        owes: bool,
    ) -> float:
        """Return the first round in which some sequence may be shadowed beside such a step.

        It holds while the pauses of drafters that are behind grow: that only makes shadows dearer.

        Args:
            owes: something is owed to the loss budget by then.
        """
        first = math.inf
        for part, state, (_, limit) in zip(rounds, states, limits, strict=True):
            k = min(limit, max(1, plan.top.num_rows // plan.batch))
            if k and (plan.batch > 1 or self.could_pay(plan, limit, kv_tokens)):
                if part.behind and self._left_s(plan, k, part.behind) < 0.0:
                    continue
                first = min(first, self._shadow_at(plan, state, k, part.behind, owes=owes))
        return first

    def probe_after(self, batch: int, limits: Sequence[Limits], *, explored: bool) -> int:
        """Return after how many rounds without a change of width trials are thought about.

        Args:
            explored: see `probe`.
        """
        if explored and self._all_measured(batch, limits):
            return PROBE_EVERY
        return PROBE_UNMEASURED_EVERY

    def shadow_interval(self, k: int, token_s: float, behind: int = 0) -> int:
        """Return the rounds between shadows of k tokens that half of the leak pays for."""
        drafting = self._cost.drafting
        draft_s = drafting.times(1)[k] + drafting.catch_up_s(behind)
        if draft_s <= 0.0:  # not timed yet, or nothing to speak of
            return SHADOW_UNTIMED
        return max(1, math.ceil(draft_s / (SHADOW_SHARE * self._ledger.rho * token_s)))

    def _shadow_at(
        self, plan: Plan, state: RequestState, k: int, behind: int, *, owes: bool
    ) -> int:
        """Return the round from which on a sequence may be shadowed."""
        interval = self.shadow_interval(k, plan.token_s, behind)
        if behind and not owes:
            interval = min(interval, SHADOW_READING)
        return state.shadow_at(interval, dear=behind > 0)

    def _left_s(self, plan: Plan, k: int, behind: int) -> float:
        """Return what may be owed at most where a shadow is drafted; below 0 it never is."""
        worst_s = self._cost.drafting.worst_s([k], plan.token_s, behind)
        ledger = self._ledger
        return 0.5 * ledger.capacity_steps * plan.classic_s + ledger.saved_s - worst_s

    def could_pay(self, plan: Plan, limit: int, kv_tokens: int) -> bool:
        """Tell whether some width would pay if every draft of it were accepted."""
        cost = self._cost
        times_s, draft_times = cost.forwards_s(2, limit, kv_tokens), cost.drafting.times(1)
        return any(
            forward_s is None
            or (1 + k) * plan.token_s > forward_s + draft_times[k] + cost.overhead_s
            for k, forward_s in enumerate(times_s, 1)
        )

    def _options(
        self,
        plan: Plan,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        rows: int,
        kv_tokens: int,
    ) -> list[Option]:
        """Return what each sequence is tried with: alone in its step, what its plan settled on."""
        if plan.batch == 1:
            limits = [Limits(0, limits[0].paid) if plan.paid[0] else Limits(limits[0].free, 0)]
        token_s = plan.token_s
        return preferred(self._cost, view.rounds, states, limits, rows, kv_tokens, token_s)

    def _all_measured(self, batch: int, limits: Sequence[Limits]) -> bool:
        verify, padded = self._cost.verify, self._cost.padded
        last = min(batch + sum([max(limit) for limit in limits]), WIDEN * verify.widest)
        return all([verify.knows(padded(rows)) for rows in range(batch + 1, last + 1)])  # noqa: C419
