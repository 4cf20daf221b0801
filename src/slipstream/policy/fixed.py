"""Policies that measure nothing: never draft, or always draft the same width.

`FixedK` is the control of every experiment: a measured policy has to beat the best of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.policy.base import Decision, RoundOutcome, RoundView
from slipstream.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Off:
    """Every round is a classic step."""

    reason: str
    mode: str = "off"
    verdict: Verdict = "off"
    predicted_speedup: float | None = None

    def choose(self, view: RoundView) -> Decision:
        """Return k = 0."""
        return Decision(k=0, reason=self.reason)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


@dataclass(frozen=True, kw_only=True)
class FixedK:
    """Every round drafts k tokens, or as many as fit."""

    k: int
    predicted_speedup: float | None = None

    @property
    def mode(self) -> str:
        """How it would be asked for."""
        return f"fixed:{self.k}"

    @property
    def verdict(self) -> Verdict:
        """Always "fixed"."""
        return "fixed"

    @property
    def reason(self) -> str:
        """That it was asked for."""
        return f"fixed: k = {self.k} was asked for"

    def choose(self, view: RoundView) -> Decision:
        """Return the fixed k, cut to the view's ceiling."""
        if self.k <= view.ceiling:
            return Decision(k=self.k, reason=self.reason)
        return Decision(
            k=view.ceiling, reason=f"fixed: k = {self.k} cut to {view.ceiling} that fit"
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""
