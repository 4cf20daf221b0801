"""Policies that measure nothing: never draft, or always draft the same width.

`FixedK` is the control of every experiment: a measured policy has to beat the best of them. It
is also what "auto" stands for as long as no cost is measured, and then its reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.policy.base import Decision, RoundOutcome, RoundView
from slipstream.types import KSetting, Verdict

# What "auto" drafts while nothing is measured: gains where text repeats, and the five rows of its
# verify still share one weight read.
UNMEASURED_K = 4


@dataclass(frozen=True, kw_only=True)
class Off:
    """Every round is a classic step."""

    reason: str
    mode: str = "off"
    verdict: Verdict = "off"

    def choose(self, view: RoundView) -> Decision:
        """Return k = 0."""
        return Decision(k=0, reason=self.reason)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


@dataclass(frozen=True, kw_only=True)
class FixedK:
    """Every round drafts k tokens, or as many as fit."""

    k: int
    mode: str
    verdict: Verdict
    reason: str

    def choose(self, view: RoundView) -> Decision:
        """Return the fixed k, cut to the view's ceiling."""
        if self.k <= view.ceiling:
            return Decision(k=self.k, reason=self.reason)
        return Decision(
            k=view.ceiling, reason=f"fixed: k = {self.k} cut to {view.ceiling} that fit"
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""


def resolve_policy(k: KSetting, *, drafter: str, ceiling: int) -> Off | FixedK:
    """Return the policy that a k setting asks for.

    Args:
        k: "auto", "off" or drafted tokens a round.
        drafter: name of the drafter, "none" for none.
        ceiling: largest k that the engine and its drafter allow; an integer k is within it.
    """
    mode = k if isinstance(k, str) else f"fixed:{k}" if k else "off"
    if k in ("off", 0):
        return Off(mode=mode, reason="off: no drafting was asked for")
    if drafter == "none":
        return Off(mode=mode, reason="off: there is no drafter")
    if isinstance(k, int):
        return FixedK(k=k, mode=mode, verdict="fixed", reason=f"fixed: k = {k} was asked for")
    if ceiling == 0:
        return Off(mode=mode, reason="off: the engine's own k is 0")
    width = min(UNMEASURED_K, ceiling)
    reason = f"unmeasured: auto stands for fixed k = {width} until a measured policy exists"
    return FixedK(k=width, mode=mode, verdict="unmeasured", reason=reason)
