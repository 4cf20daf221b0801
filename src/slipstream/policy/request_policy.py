"""One request's view of the policy that it shares with all requests of its pairing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.policy.base import Decision, RoundOutcome, RoundView, StepView
from slipstream.policy.estimate import speedup
from slipstream.policy.options import Limits, better_is_paid
from slipstream.policy.plan import plan_step, refuse
from slipstream.types import Verdict

if TYPE_CHECKING:
    from slipstream.policy.choose import MeasuredPolicy


class RequestPolicy:
    """A `Policy` for a request that is alone in its steps; a report for any other.

    Args:
        pairing: the policy of target and drafter.
        number: which request it is.
        fixed_k: what it drafts whatever the pairing's policy thinks; None leaves it to that.
    """

    def __init__(self, pairing: MeasuredPolicy, number: int, fixed_k: int | None = None) -> None:
        self.pairing = pairing
        self.number = number
        self.fixed_k = fixed_k
        self.mode = "auto" if fixed_k is None else f"fixed:{fixed_k}"

    @property
    def verdict(self) -> Verdict:
        """What the measurements say about this request."""
        return "fixed" if self.fixed_k is not None else self._report()[0]

    @property
    def reason(self) -> str:
        """The verdict in words and numbers."""
        if self.fixed_k is not None:
            return f"fixed: k = {self.fixed_k} was asked for"
        return self._report()[1]

    @property
    def predicted_speedup(self) -> float | None:
        """S of the request's best width, or of its fixed one; None while unmeasured."""
        return self._report()[2] if self.fixed_k is None else self._predict(self.fixed_k)

    def choose(self, view: RoundView) -> Decision:
        """Return the next round's k."""
        fixed_k = None if self.fixed_k is None else min(self.fixed_k, view.ceiling)
        return self.pairing.choose(replace(view, request=self.number, fixed_k=fixed_k))

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in what a round did."""
        fixed = self.fixed_k is not None
        self.pairing.observe(replace(outcome, request=self.number, fixed=fixed))

    def _report(self) -> tuple[Verdict, str, float | None]:
        """Return verdict, reason and S of the best width, as if the request were to begin now."""
        policy = self.pairing
        state = policy.requests.get(self.number)
        if state is None or not policy.cost.classic.time_s(1, state.context_len):
            return "unmeasured", "unmeasured: no classic step was timed yet", None
        owed = policy.ledger.owed(policy.cost.classic_s(1, state.context_len) or 0.0)
        offered = state.acceptance.free.trials(1) > 0
        if not policy.paid and not offered:
            what = "the drafter found nothing to offer"
            if policy.rests:
                what = (
                    f"the loss budget is spent: {owed} are owed, and lookups rest until it is paid"
                )
            return "decline", f"decline: {what}", None
        most, context_len = policy.max_k, state.context_len
        limits = Limits(most if offered else 0, most if policy.paid else 0)
        view = RoundView(
            remaining=most + 1, context_len=context_len, proposed=limits.free, ceiling=most
        )
        begun = replace(state, k=0)
        step = StepView(rounds=(view,))
        plan = plan_step(policy.cost, step, [begun], [limits], context_len)
        if plan is None or not plan.top.num_rows:
            return "unmeasured", "unmeasured: no verify was timed yet", None
        best = min(plan.top.speedup, 1.0 + plan.top.num_rows)
        if not plan.num_rows:
            return "decline", plan.reason("decline"), best
        refusal = refuse(plan, policy.ledger, [begun])
        if refusal and not policy.affordable(plan, step, [begun], [limits], context_len):
            return "decline", refusal, best
        return "enable", plan.reason("enable"), best

    def _predict(self, k: int) -> float | None:
        """Return S of a width, None if the request or its cost is unknown."""
        cost, state = self.pairing.cost, self.pairing.requests.get(self.number)
        if state is None:
            return None
        limits = Limits(k if state.acceptance.free.trials(1) else 0, k if self.pairing.paid else 0)
        paid = better_is_paid(state.acceptance, limits, k)
        draft_s = cost.drafting.peek_s(1) + (cost.drafting.times(1)[k] if paid else 0.0)
        classic_s = cost.classic.time_s(1, state.context_len)
        round_s = cost.round_s(k + 1, state.context_len, draft_s)
        if not classic_s or not round_s:
            return None
        return speedup(1.0 + state.acceptance[paid].expected[k], classic_s, round_s)
