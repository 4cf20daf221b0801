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
        mode: as it was asked for.
    """

    def __init__(self, pairing: MeasuredPolicy, number: int, mode: str) -> None:
        self.pairing = pairing
        self.number = number
        self.mode = mode

    @property
    def verdict(self) -> Verdict:
        """What the measurements say about this request."""
        return self.pairing.report(self.number)[0]

    @property
    def reason(self) -> str:
        """The verdict in words and numbers."""
        return self.pairing.report(self.number)[1]

    @property
    def predicted_speedup(self) -> float | None:
        """S of the request's best width, None while unmeasured."""
        return self.pairing.report(self.number)[2]

    def choose(self, view: RoundView) -> Decision:
        """Return the next round's k."""
        return self.pairing.choose(replace(view, request=self.number))

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in what a round did."""
        self.pairing.observe(replace(outcome, request=self.number))
