"""One request's view of the policy that it shares with all requests of its pairing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.policy.base import Decision, RoundOutcome, RoundView
from slipstream.policy.estimate import speedup
from slipstream.policy.forecast import forecast
from slipstream.policy.options import Limits, better_is_paid
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
        state = self.pairing.requests.get(self.number)
        if state is None:
            return "unmeasured", "unmeasured: no classic step was timed yet", None
        found = forecast(self.pairing, [replace(state, k=0)])
        return found.verdict, found.reason, found.speedup

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
