"""The decision itself: what a step drafts, from what is known. It keeps and changes nothing.

In order: a classic step that is due is taken; else the width with the best speedup runs, if it
leaves k = 0 by a margin and its worst case fits the loss budget; else a width that might be better
is tried now and then, on the same budget; else a classic step, beside which a paid drafter may be
shadowed. What was decided stands for rounds like it until something is learned, which terms see to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from slipstream.policy.acceptance import PRIOR_TRIALS, Acceptances
from slipstream.policy.base import Decision, StepView
from slipstream.policy.explore import PROBE_UNMEASURED_EVERY, Explorer
from slipstream.policy.ledger import Ledger
from slipstream.policy.options import Limits
from slipstream.policy.plan import Plan, plan_step, refuse
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.policy.terms import Standing, Terms, key_of

# Share of the gain that classic steps may cost while drafting pays, and their cadence in rounds:
# often enough that heat shows within a second or two, seldom enough at small gains.
CLASSIC_SHARE = 0.005
CLASSIC_EVERY = (48, 512)
# A round that drafts is believed to take less than this share of a classic step only for so many
# rounds: then the classic step is timed again, whatever its cadence.
CLASSIC_TOO_SLOW = 0.9
CLASSIC_AGAIN = 8

NARROWED = "enable within the loss budget"


class Decider:
    """Decides about steps of one pairing.

    Args:
        paid: the pairing has a drafter that takes time for each token.
    """

    def __init__(self, cost: RoundCost, ledger: Ledger, *, paid: bool) -> None:
        self._cost = cost
        self._ledger = ledger
        self._paid = paid
        self._explorer = Explorer(cost, ledger)

    def decide(
        self,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        terms: Terms | None,
        pairing: Acceptances,
        now: int,
    ) -> list[Decision]:
        """Return the decisions of rounds of which one at least may draft.

        Args:
            states, limits: of each round of the view: what is known of it, and its largest k.
            terms: of a step like this one; None where there are none.
            pairing: how often drafts of all requests are right.
            now: the number of the round.
        """
        if terms is None:
            return self._decide(view, states, limits, pairing, now)[0]
        key = key_of(limits, drafted=any([state.k for state in states]))  # noqa: C419
        standing = terms.plans.get(key)
        if standing is not None and self._stands(standing, view, states, limits, now):
            return standing.decisions
        decisions, plan = self._decide(view, states, limits, pairing, now)
        if plan is not None:
            terms.plans[key] = self._standing(
                plan, decisions, view, states, limits, explored=_explored(view, pairing)
            )
        return decisions

    def _decide(
        self,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        pairing: Acceptances,
        now: int,
    ) -> tuple[list[Decision], Plan | None]:
        """Return decisions, and the plan behind them if it serves other rounds as well."""
        batch, own_kv = len(states), sum([part.context_len for part in view.rounds])
        kv = view.prefill_kv + own_kv
        if not self._cost.knows_classic(batch, own_kv):
            return classic(view, f"unmeasured: timing the classic step of batch {batch}"), None
        plan = plan_step(self._cost, view, states, limits, kv)
        if plan is None:
            return classic(view, "unmeasured: no step with these prompt rows was timed"), None
        if plan.num_rows and now >= self._classic_at(plan, own_kv):
            return classic(view, "classic: its time is measured again"), None
        explored = _explored(view, pairing)
        probe = self._explorer.probe(plan, view, states, limits, kv, now, explored=explored)
        if probe is not None and probe.num_rows and refuse(probe, self._ledger, states) is None:
            return probe.decisions("probe"), None
        if not plan.num_rows:
            decisions = self._declined(view, plan, states, limits, kv, now)
            shadows = any([decision.shadow for decision in decisions])  # noqa: C419
            return decisions, None if shadows else plan
        refusal = refuse(plan, self._ledger, states)
        if refusal is None:
            return plan.decisions("enable"), plan
        less = self.affordable(plan, view, states, limits, kv)
        return less.decisions(NARROWED) if less else classic(view, refusal), None

    def affordable(
        self,
        plan: Plan,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        kv_tokens: int,
    ) -> Plan | None:
        """Return the best plan with fewer rows that pays and that the budgets allow, if any."""
        rows = plan.num_rows
        while rows > 1:
            rows //= 2
            less = plan_step(
                self._cost, replace(view, max_draft_rows=rows), states, limits, kv_tokens
            )
            if less is None or not less.num_rows:
                return None
            if refuse(less, self._ledger, states) is None:
                return less
        return None

    def _stands(
        self,
        standing: Standing,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        now: int,
    ) -> bool:
        """Tell whether a plan is what would be decided anew."""
        if now >= standing.due_at or not standing.serves(view, limits):
            return False
        if now >= standing.due_unowed_at and self._ledger.debt_s <= 0.0:
            return False
        waited = now - max([state.changed_at for state in states])
        if waited >= standing.probe_after and waited % PROBE_UNMEASURED_EVERY == 0:
            return False
        plan = standing.plan
        return not plan.num_rows or refuse(plan, self._ledger, states) is None

    def _standing(
        self,
        plan: Plan,
        decisions: list[Decision],
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        *,
        explored: bool,
    ) -> Standing:
        kv = sum([part.context_len for part in view.rounds])
        due_at = due_unowed_at = math.inf
        if plan.num_rows:
            due_at = self._classic_at(plan, kv)
        elif self._paid:
            rounds, shadow_from = view.rounds, self._explorer.shadow_from
            due_at = shadow_from(plan, rounds, states, limits, kv, owes=True)
            if any([part.behind for part in rounds]):  # noqa: C419
                due_unowed_at = shadow_from(plan, rounds, states, limits, kv, owes=False)
        return Standing(
            plan,
            decisions,
            limits,
            view,
            due_at=due_at,
            due_unowed_at=due_unowed_at,
            probe_after=self._explorer.probe_after(plan.batch, limits, explored=explored),
        )

    def _classic_at(self, plan: Plan, kv_tokens: int) -> float:
        """Return the round in which the classic step should be timed again."""
        level = self._cost.classic.level(plan.batch, kv_tokens)
        if level is None or level.strays:  # it has changed, or was held up: the next one tells
            return -math.inf
        # No round that drafts is faster than a classic step, unless the machine has changed since.
        if plan.round_s < CLASSIC_TOO_SLOW * plan.base_s:
            return level.seen_at + CLASSIC_AGAIN
        lost_s = (plan.top.speedup - 1.0) * plan.base_s
        wanted = lost_s / (CLASSIC_SHARE * plan.round_s)
        return level.seen_at + min(max(wanted, CLASSIC_EVERY[0]), CLASSIC_EVERY[1])

    def _declined(
        self,
        view: StepView,
        plan: Plan,
        states: Sequence[RequestState],
        limits: Sequence[Limits],
        kv: int,
        now: int,
    ) -> list[Decision]:
        """Return classic steps, and the shadows that the ledger allows beside them."""
        reason = plan.reason("decline")
        if not self._paid:
            return classic(view, reason)
        return [
            Decision(
                k=0,
                reason=reason,
                shadow=self._explorer.shadow(plan, state, limit.paid, kv, now, behind=part.behind),
            )
            for part, state, limit in zip(view.rounds, states, limits, strict=True)
        ]


def _explored(view: StepView, pairing: Acceptances) -> bool:
    """Tell whether the paid drafter's record outweighs its prior, or it need not read."""
    return pairing.paid.trials(1) >= PRIOR_TRIALS or not any(
        [part.behind for part in view.rounds]  # noqa: C419
    )


def classic(view: StepView, reason: str) -> list[Decision]:
    """Return a classic step's decisions."""
    return [Decision(k=0, reason=reason) for _ in view.rounds]
