"""A step's plan: who drafts how much, what it promises, and whether the budget allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.policy.base import Decision, StepView
from slipstream.policy.estimate import LEAVE_MARGIN, WIDTH_MARGIN, compare
from slipstream.policy.ledger import Ledger
from slipstream.policy.options import Limits, Option, options, preferred
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.policy.widths import Best, fastest, share_rows

NO_ROWS, NO_TOP = Best(0, 1.0, 0.0), Best(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step would do.

    Attributes:
        batch: sequences that decode.
        widths: k of each sequence; all 0 if nothing pays.
        paid: whether it is the paid drafter that drafts, for each sequence.
        chosen: the drafted rows that pay; 0 rows for none.
        top: the best that was looked at, whether it pays or not.
        base_s: the step without drafts.
        token_s: classic seconds of one token.
        round_s: the step as `top` has it.
        worst_s, value_s: worst case of the chosen step, lower bound of the step without drafts.
        classic_s: a classic step of this batch.
    """

    batch: int
    widths: list[int]
    paid: list[bool]
    chosen: Best
    top: Best
    base_s: float
    token_s: float
    round_s: float
    worst_s: float
    value_s: float
    classic_s: float

    @property
    def num_rows(self) -> int:
        """Drafted rows of the step."""
        return self.chosen.num_rows

    def reason(self, what: str) -> str:
        """Return the numbers behind it in words."""
        if not self.top.num_rows:
            return f"{what}: no width was timed yet"
        emitted = self.batch + self.top.gain
        return f"{what}: {compare(self.round_s, emitted, self.token_s)}"

    def decisions(self, what: str) -> list[Decision]:
        """Return the decision of each sequence."""
        reason = self.reason(what)
        return [
            Decision(k=k, reason=reason, paid=paid and k > 0)
            for k, paid in zip(self.widths, self.paid, strict=True)
        ]


def plan_step(
    cost: RoundCost,
    view: StepView,
    states: Sequence[RequestState],
    limits: Sequence[Limits],
    kv_tokens: int,
) -> Plan | None:
    """Return the fastest plan for a step; None where the step without drafts was never timed.

    Args:
        states, limits: of each round of the view: what is known of it, and its largest k.
        kv_tokens: KV positions that the step reads.
    """
    batch = len(states)
    riding = view.riding_rows
    classic_s = cost.classic_s(batch, kv_tokens - view.prefill_kv)
    base_s = cost.base_s(batch, riding, kv_tokens) if riding else classic_s
    if base_s is None or classic_s is None:
        return None
    bar = 1.0 if any(state.k for state in states) else 1.0 + LEAVE_MARGIN
    rows = batch + riding
    fixed_s = cost.overhead_s + cost.drafting.peek_s(batch)
    if riding:
        riding_s = cost.drafting.drafting_s(view.fixed_drafts)
        riding_s += cost.drafting.catch_up_s(view.fixed_behind)
        base_s += riding_s
        fixed_s += riding_s
    token_s = classic_s / batch
    most = view.max_draft_rows
    if batch == 1:
        found: tuple[Best, Best] | None = None
        picked = False
        part = view.rounds[0]
        for option in options(
            states[0].acceptance,
            limits[0],
            cost.drafting.times(1),
            catch_up_s=cost.drafting.catch_up_s(part.behind),
            remaining=part.remaining,
        ):
            limit = option.limit if most is None else min(option.limit, most)
            best = _one(cost, option, limit, rows, kv_tokens, base_s, token_s, fixed_s, bar)
            if found is None or _beats(best, found):
                found, picked = best, option.paid
        if found is None:
            found = (NO_ROWS, NO_TOP)
        (chosen, top), paid = found, [picked]
        widths = [chosen.num_rows]
    else:
        taken = preferred(cost, view.rounds, states, limits, rows, kv_tokens, token_s)
        num_rows = sum([option.limit for option in taken])
        order = share_rows(
            [option.survival for option in taken],
            [option.limit for option in taken],
            num_rows if most is None else most,
        )
        chosen, top = fastest(
            order,
            base_s=base_s,
            token_s=token_s,
            times_s=cost.forwards_s(rows + 1, len(order), kv_tokens),
            fixed_s=fixed_s,
            draft_times=[option.draft_times for option in taken],
            bar=bar,
            width_margin=WIDTH_MARGIN,
        )
        widths = widths_of(order[: chosen.num_rows], batch)
        paid = [option.paid for option in taken]
    return make_plan(cost, view, widths, paid, chosen, top, base_s, classic_s, kv_tokens)


def make_plan(
    cost: RoundCost,
    view: StepView,
    widths: list[int],
    paid: list[bool],
    chosen: Best,
    top: Best,
    base_s: float,
    classic_s: float,
    kv_tokens: int,
) -> Plan:
    """Return a plan with its worst case filled in."""
    batch = len(widths)
    value_s = worst_s = 0.0
    if chosen.num_rows:
        riding, kv_own = view.riding_rows, kv_tokens - view.prefill_kv
        value_s = cost.step_value_s(batch, riding, kv_own, view.prefill_kv)
        drafts = [k if is_paid else 0 for k, is_paid in zip(widths, paid, strict=True)]
        behind = sum([part.behind for part, k in zip(view.rounds, drafts, strict=True) if k])
        if riding:
            value_s += cost.drafting.drafting_s(view.fixed_drafts)
            value_s += cost.drafting.catch_up_s(view.fixed_behind)
            drafts += view.fixed_drafts
            behind += view.fixed_behind
        num_rows = batch + riding + chosen.num_rows
        worst_s = cost.worst_s(num_rows, kv_tokens, drafts, classic_s, behind)
    token_s = classic_s / batch
    shown = chosen if chosen.num_rows else top
    round_s = (base_s + shown.gain * token_s) / shown.speedup if shown.num_rows else base_s
    return Plan(
        batch, widths, paid, chosen, shown, base_s, token_s, round_s, worst_s, value_s, classic_s
    )


def widths_of(order: Sequence[tuple[int, float]], batch: int) -> list[int]:
    """Return how many rows each sequence has in an order."""
    widths = [0] * batch
    for index, _ in order:
        widths[index] += 1
    return widths


def refuse(plan: Plan, ledger: Ledger, states: Sequence[RequestState]) -> str | None:
    """Return why the budgets do not allow a plan, None if they do."""
    budgets = [ledger]
    if plan.batch > 1:
        budgets += [state.neighbour for state in states]
    for budget in budgets:
        if not budget.may_start(
            worst_s=plan.worst_s, anchors_s=plan.value_s, classic_s=plan.classic_s
        ):
            whose = "the loss budget" if budget is ledger else "a neighbour's budget"
            return (
                f"decline: {whose} is spent: {budget.owed(plan.classic_s)} are owed and the round "
                f"may lose {1e3 * (plan.worst_s - plan.value_s):.1f} ms"
            )
    return None


def _beats(one: tuple[Best, Best], other: tuple[Best, Best]) -> bool:
    """Tell whether an option is better than another: what it pays, or else what it comes to."""
    (chosen, top), (other_chosen, other_top) = one, other
    if chosen.num_rows and other_chosen.num_rows:
        return chosen.speedup > other_chosen.speedup
    return bool(chosen.num_rows) or (not other_chosen.num_rows and top.speedup > other_top.speedup)


def _one(
    cost: RoundCost,
    option: Option,
    limit: int,
    rows: int,
    kv_tokens: int,
    base_s: float,
    token_s: float,
    fixed_s: float,
    bar: float,
) -> tuple[Best, Best]:
    """Return what `fastest` does for a single sequence, in less time."""
    expected, draft_times = option.expected, option.draft_times
    top_k = chosen_k = 0
    top = chosen = 0.0
    for k, forward_s in enumerate(cost.forwards_s(rows + 1, limit, kv_tokens), 1):
        if forward_s is None:
            continue
        value = (base_s + expected[k] * token_s) / (forward_s + fixed_s + draft_times[k])
        if value > top:
            top, top_k = value, k
        if value > bar:
            chosen, chosen_k = value, k
            bar = value * (1.0 + WIDTH_MARGIN)
    return (
        Best(chosen_k, chosen or 1.0, expected[chosen_k]),
        Best(top_k, top, expected[top_k]),
    )
