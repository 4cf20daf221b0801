"""One request's view of the policy that it shares with all requests of its pairing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.policy.base import Decision, RoundOutcome, RoundView
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
        return "fixed" if self.fixed_k is not None else self.pairing.report(self.number)[0]

    @property
    def reason(self) -> str:
        """The verdict in words and numbers."""
        if self.fixed_k is not None:
            return f"fixed: k = {self.fixed_k} was asked for"
        return self.pairing.report(self.number)[1]

    @property
    def predicted_speedup(self) -> float | None:
        """S of the request's best width, or of its fixed one; None while unmeasured."""
        if self.fixed_k is not None:
            return self.pairing.predict(self.number, self.fixed_k)
        return self.pairing.report(self.number)[2]

    def choose(self, view: RoundView) -> Decision:
        """Return the next round's k."""
        fixed_k = None if self.fixed_k is None else min(self.fixed_k, view.ceiling)
        return self.pairing.choose(replace(view, request=self.number, fixed_k=fixed_k))

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in what a round did."""
        fixed = self.fixed_k is not None
        self.pairing.observe(replace(outcome, request=self.number, fixed=fixed))
