"""What the measurements say about drafting now, for reports: verdict, reason, widths, speedup.

A forecast is what `choose_step` would decide if every drafter offered as much as it may and no
trial were due. It is asked between two steps, by the thread that runs them, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.policy.base import RoundView, StepView
from slipstream.policy.options import Limits
from slipstream.policy.plan import Plan, plan_step, refuse
from slipstream.policy.request_state import RequestState
from slipstream.types import Verdict

if TYPE_CHECKING:
    from slipstream.policy.choose import MeasuredPolicy


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A verdict with its numbers.

    Attributes:
        speedup: S of the best width, whether it pays or not; None while unmeasured.
        widths: k of each request; all 0 unless the verdict is "enable".
        paid: whether it is the paid drafter that would draft, for each request.
    """

    verdict: Verdict
    reason: str
    speedup: float | None
    widths: list[int]
    paid: list[bool]


def forecast(policy: MeasuredPolicy, states: Sequence[RequestState]) -> Forecast:
    """Return what would be decided for requests that share a step, at least one.

    Args:
        states: what is known of each; their contexts are where they are now.
    """
    most, batch = policy.max_k, len(states)
    kv_tokens = sum([state.context_len for state in states])
    if not policy.cost.classic.time_s(batch, kv_tokens):
        what = "step" if batch == 1 else f"step of batch {batch}"
        return _without(policy, batch, "unmeasured", f"unmeasured: no classic {what} was timed yet")
    offered = [state.acceptance.free.trials(1) > 0 for state in states]
    if not policy.paid and not any(offered):
        return _without(policy, batch, "decline", _nothing_offered(policy, batch, kv_tokens))
    limits = [
        Limits(most if is_offered else 0, most if policy.paid else 0) for is_offered in offered
    ]
    view = StepView(
        rounds=[
            RoundView(
                remaining=most + 1,
                context_len=state.context_len,
                proposed=limit.free,
                ceiling=most,
            )
            for state, limit in zip(states, limits, strict=True)
        ]
    )
    plan = plan_step(policy.cost, view, states, limits, kv_tokens)
    if plan is None or not plan.top.num_rows:
        return _without(policy, batch, "unmeasured", "unmeasured: no verify was timed yet")
    if not plan.num_rows:
        return _declined(plan, plan.reason("decline"))
    refusal = refuse(plan, policy.ledger, states)
    if refusal is None:
        return _enabled(plan, plan)
    less = policy.decider.affordable(plan, view, states, limits, kv_tokens)
    return _declined(plan, refusal) if less is None else _enabled(plan, less)


def _nothing_offered(policy: MeasuredPolicy, batch: int, kv_tokens: int) -> str:
    if not policy.rests:
        return "decline: the drafter found nothing to offer"
    owed = policy.ledger.owed(policy.cost.classic_s(batch, kv_tokens) or 0.0)
    return f"decline: lookups rest until less is owed to the loss budget: now {owed}"


def _best(plan: Plan) -> float:
    """Return S of a plan's best width, which no draft can be worth more than itself."""
    return min(plan.top.speedup, 1.0 + plan.top.num_rows / plan.batch)


def _enabled(plan: Plan, run: Plan) -> Forecast:
    return Forecast(
        verdict="enable",
        reason=plan.reason("enable"),
        speedup=_best(plan),
        widths=run.widths,
        paid=run.paid,
    )


def _declined(plan: Plan, reason: str) -> Forecast:
    return Forecast(
        verdict="decline",
        reason=reason,
        speedup=_best(plan),
        widths=[0] * plan.batch,
        paid=plan.paid,
    )


def _without(policy: MeasuredPolicy, batch: int, verdict: Verdict, reason: str) -> Forecast:
    paid = [policy.paid] * batch
    return Forecast(verdict=verdict, reason=reason, speedup=None, widths=[0] * batch, paid=paid)
