"""The measured policy: how many tokens each round drafts, from what was measured.

`choose_step` is pure and `observe_step` the only mutation, so a recorded run can be replayed
through it. In order: a classic step that is due is taken; else the width with the best speedup
runs, if it leaves k = 0 by a margin and its worst case fits the loss budget; else a width that
might be better is tried now and then, on the same budget; else a classic step, beside which a paid
drafter may be shadowed. The state diagram and every constant's origin: docs/policy.md.

One policy serves one pairing of target and drafter; requests are told apart by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.policy.acceptance import Acceptance
from slipstream.policy.base import Decision, RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.cost import DEFAULT_EDGES
from slipstream.policy.estimate import speedup
from slipstream.policy.explore import Explorer
from slipstream.policy.ledger import Ledger
from slipstream.policy.plan import Plan, plan_step, refuse
from slipstream.policy.quiet import Quiet
from slipstream.policy.request_policy import RequestPolicy
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.types import MAX_K, Verdict

# Classic steps before the first draft, and at a context octave that is new to a known batch size.
FIRST_CLASSIC = 3
# Share of the gain that classic steps may cost while drafting pays, and their cadence in rounds:
# often enough that heat shows within a second or two, seldom enough at small gains.
CLASSIC_SHARE = 0.005
CLASSIC_EVERY = (48, 512)


# A free drafter whose proposals take more than the leak gives rests while more than this share of
# the budget is owed, so that a round can still start.
PEEK_SHARE = 0.5

FIXED = "fixed: this k was asked for"
NARROWED = "enable within the loss budget"


class MeasuredPolicy:
    """Sizes the rounds of every request of one pairing.

    Args:
        free: the drafter costs nothing and proposes before k is chosen, as n-gram lookup does.
        edges: row buckets of the device's dispatch table.
        bandwidth_bound: a verify is known to read the weights once; asked only where no classic
            step was measured.
        max_k: the server's ceiling.
        pad_to: the rows of a forward that drafts are filled up to a multiple of this.
    """

    mode = "auto"

    def __init__(
        self,
        *,
        free: bool = False,
        edges: Sequence[int] = DEFAULT_EDGES,
        bandwidth_bound: bool = False,
        max_k: int = MAX_K,
        pad_to: int = 1,
    ) -> None:
        self.free = free
        self.max_k = max_k
        self.cost = RoundCost(edges, free=free, bandwidth_bound=bandwidth_bound, pad_to=pad_to)
        self.acceptance = Acceptance()
        self.ledger = Ledger()
        self.requests: dict[int, RequestState] = {}
        self.rounds = 0
        # Whether a free drafter should be asked: not while its own time eats the budget.
        self.may_peek = True
        self._quiet = Quiet()
        self._last: StepOutcome | None = None  # looked at in full, and no step passed by since
        self._explorer = Explorer(self.cost, self.ledger)

    def choose(self, view: RoundView) -> Decision:
        """Return the k of a round that is alone in its step."""
        return self.choose_step(StepView(rounds=(view,)))[0]

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in a round that was alone in its step."""
        self.observe_step(
            StepOutcome(
                rounds=(outcome,),
                draft_s=outcome.draft_s,
                verify_s=outcome.verify_s,
                round_s=outcome.round_s,
            )
        )

    def choose_step(self, view: StepView) -> list[Decision]:
        """Return the decision of each round of a step. Pure."""
        decisions = self._choose(view)
        if view.fixed_widths:
            decisions = [
                Decision(k=part.fixed_k, reason=FIXED) if part.fixed_k else decision
                for part, decision in zip(view.rounds, decisions, strict=True)
            ]
        return decisions

    def _choose(self, view: StepView) -> list[Decision]:
        """Return the decisions of rounds whose width is the policy's choice, 0 for the others."""
        limits = [self._limit(part) for part in view.rounds]
        if not any(limits):
            return self._classic(view, "decline: no draft is offered, or none fits")
        batch = len(view.rounds)
        kv = view.prefill_kv + sum([part.context_len for part in view.rounds])
        if not self._classic_known(batch, kv - view.prefill_kv):
            return self._classic(view, f"unmeasured: timing the classic step of batch {batch}")
        states = [self._state(part.request) for part in view.rounds]
        plan = plan_step(self.cost, view, states, limits, kv)
        if plan is None:
            return self._classic(view, "unmeasured: no step with these prompt rows was timed")
        if plan.num_rows and self._classic_stale(plan, kv - view.prefill_kv):
            return self._classic(view, "classic: its time is measured again")
        for what, wanted in (
            ("probe", self._explorer.probe(plan, view, states, limits, kv, self.rounds)),
            ("enable", plan),
        ):
            if wanted is not None and wanted.num_rows:
                refusal = refuse(wanted, self.ledger, states)
                if refusal is None:
                    return wanted.decisions(what)
                if what == "enable":
                    less = self._affordable(plan, view, states, limits, kv)
                    return less.decisions(NARROWED) if less else self._classic(view, refusal)
        return self._declined(view, plan, states, limits, kv)

    def _affordable(
        self,
        plan: Plan,
        view: StepView,
        states: Sequence[RequestState],
        limits: Sequence[int],
        kv_tokens: int,
    ) -> Plan | None:
        """Return the best plan with fewer rows that pays and that the budgets allow, if any."""
        rows = plan.num_rows
        while rows > 1:
            rows //= 2
            less = plan_step(
                self.cost, replace(view, max_draft_rows=rows), states, limits, kv_tokens
            )
            if less is None or not less.num_rows:
                return None
            if refuse(less, self.ledger, states) is None:
                return less
        return None

    def observe_step(self, outcome: StepOutcome) -> None:
        """Take in a step: charge the ledger raw time, then learn from it."""
        if not outcome.rounds:
            return
        self.settle()
        self.rounds += 1
        for part in outcome.rounds:
            if part.request not in self.requests:
                self.requests[part.request] = self._state(part.request)
        self._charge(outcome)
        self.cost.observe(outcome, self.rounds)
        for part in outcome.rounds:
            self.requests[part.request].observe(part, self.acceptance, self.rounds)
        self._last = outcome
        self.may_peek = self.ledger.debt_s <= 0.0 or self._may_peek(outcome)

    def pass_by(
        self, requests: Sequence[int], kv_tokens: int, draft_s: float, round_s: float
    ) -> bool:
        """Take in a classic step that has nothing to teach, in next to no time.

        Such a step drafted nothing, and nothing was offered or scored. A few in a row are accounted
        for together by the next `settle`.

        Args:
            requests: those that took part, in the order of the step before.
            kv_tokens: KV positions that they read.

        Returns:
            False if it has something to teach after all: then `observe_step` wants it.
        """
        if self._last is not None:
            self._start_quiet(self._last)
            self._last = None
        return self._quiet.add(requests, kv_tokens, draft_s, round_s)

    def settle(self) -> None:
        """Account for the steps that passed by. An engine does so before it asks for a choice."""
        quiet = self._quiet
        if not quiet.count:
            return
        self.rounds += quiet.count
        self.ledger.leak(
            value_s=min(quiet.count * quiet.value_s, quiet.classic_s), lost_s=quiet.draft_s
        )
        if len(quiet.requests) > 1:
            for number in quiet.requests:
                if number in self.requests:
                    self.requests[number].neighbour.leak(value_s=quiet.count * quiet.value_s)
        quiet.clear()

    def forget(self, request: int) -> None:
        """Let go of a request that ended; what it taught about the pairing stays."""
        self.requests.pop(request, None)

    def request(self, number: int, fixed_k: int | None = None) -> RequestPolicy:
        """Return the view that one request has of this policy.

        Args:
            fixed_k: what it drafts whatever the policy thinks; None leaves it to the policy.
        """
        return RequestPolicy(self, number, fixed_k)

    def snapshot(self) -> dict[str, Any]:
        """Return what outlives the process, as JSON values."""
        return {
            "cost": self.cost.state(),
            "acceptance": self.acceptance.state(),
            "debt_s": self.ledger.debt_s,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        self.cost.restore(state["cost"])
        self.acceptance = Acceptance(state["acceptance"])
        self.ledger.debt_s = float(state["debt_s"])

    def forget_costs(self) -> None:
        """Let go of all times, as when the machine is found to be another; not of the debt."""
        self.cost = RoundCost(
            self.cost.verify.edges,
            free=self.free,
            bandwidth_bound=self.cost.bandwidth_bound,
            pad_to=self.cost.pad_to,
        )
        self._explorer = Explorer(self.cost, self.ledger)

    def report(self, number: int) -> tuple[Verdict, str, float | None]:
        """Return a request's verdict, its reason and the predicted speedup of its best width."""
        state = self.requests.get(number)
        if state is None or not self.cost.classic.time_s(1, state.context_len):
            return "unmeasured", "unmeasured: no classic step was timed yet", None
        if self.free and not state.acceptance.trials(1):
            return "decline", "decline: the drafter found nothing to offer", None
        limit = self.max_k
        view = RoundView(
            remaining=limit + 1, context_len=state.context_len, proposed=limit, ceiling=limit
        )
        step = StepView(rounds=(view,))
        state = replace(state, k=0)  # what it would take to begin, whatever the last round was
        plan = plan_step(self.cost, step, [state], [limit], state.context_len)
        if plan is None or not plan.top.num_rows:
            return "unmeasured", "unmeasured: no verify was timed yet", None
        verdict: Verdict = "enable" if plan.num_rows else "decline"
        return verdict, plan.reason(verdict), plan.top.speedup

    def predict(self, number: int, k: int) -> float | None:
        """Return the predicted speedup of a request that is alone and drafts k, None if unknown."""
        state = self.requests.get(number)
        if state is None:
            return None
        classic_s = self.cost.classic.time_s(1, state.context_len)
        round_s = self.cost.round_s(k + 1, state.context_len, self.cost.draft_times[k])
        if not classic_s or not round_s:
            return None
        return speedup(1.0 + state.acceptance.expected[k], classic_s, round_s)

    def _limit(self, view: RoundView) -> int:
        """Return the largest k of a round."""
        if view.fixed_k is not None:
            return 0
        offered = view.proposed if self.free else view.ceiling
        return min(offered, view.ceiling, view.remaining - 1, self.max_k)

    def _state(self, request: int) -> RequestState:
        """Return what is known of a request, or what its first round will start from."""
        state = self.requests.get(request)
        return state or RequestState.start(self.acceptance.chances, self.rounds)

    def _classic_known(self, batch: int, kv_tokens: int) -> bool:
        """Tell whether classic steps of a batch size were timed at a context like this one."""
        level = self.cost.classic.level(batch, kv_tokens)
        return level is not None and self.cost.classic.samples(batch) >= FIRST_CLASSIC

    def _classic_stale(self, plan: Plan, kv_tokens: int) -> bool:
        """Tell whether the classic step should be timed again."""
        level = self.cost.classic.level(plan.batch, kv_tokens)
        if level is None:
            return True
        lost_s = (plan.top.speedup - 1.0) * plan.base_s
        wanted = lost_s / (CLASSIC_SHARE * plan.round_s)
        return self.rounds - level.seen_at >= min(max(wanted, CLASSIC_EVERY[0]), CLASSIC_EVERY[1])

    def _classic(self, view: StepView, reason: str, shadow: int = 0) -> list[Decision]:
        return [Decision(k=0, reason=reason, shadow=shadow) for _ in view.rounds]

    def _declined(
        self, view: StepView, plan: Plan, states: list[RequestState], limits: list[int], kv: int
    ) -> list[Decision]:
        """Return classic steps, and the shadows that the ledger allows beside them."""
        reason = plan.reason("decline")
        if self.free:
            return self._classic(view, reason)
        return [
            Decision(
                k=0,
                reason=reason,
                shadow=self._explorer.shadow(plan, state, limit, kv, self.rounds),
            )
            for state, limit in zip(states, limits, strict=True)
        ]

    def _may_peek(self, outcome: StepOutcome) -> bool:
        """Tell whether a free drafter should be asked: the leak pays for it, or there is room."""
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        classic_s = self.cost.classic_s(batch, kv)
        if classic_s is None:
            return True
        room_s = self.ledger.room_s(classic_s, PEEK_SHARE)
        return self.cost.peek_s(batch) <= max(room_s, self.ledger.rho * classic_s)

    def _start_quiet(self, outcome: StepOutcome) -> None:
        """Let steps like this one pass by, if what they are worth is known."""
        batch, kv = len(outcome.rounds), sum([part.context_len for part in outcome.rounds])
        value_s = None
        if outcome.prefill_rows == 0 and self._classic_known(batch, kv):
            value_s = self.cost.value_s(batch, kv)
        classic_s = value_s or 0.0
        self._quiet.start(
            outcome,
            value_s,
            room_s=self.ledger.room_s(classic_s, PEEK_SHARE),
            leak_s=self.ledger.rho * classic_s,
        )

    def _charge(self, outcome: StepOutcome) -> None:
        """Account for a step by what classic steps would have taken for its tokens."""
        batch = len(outcome.rounds)
        kv = sum([part.context_len for part in outcome.rounds])
        classic_s = self.cost.value_s(batch, kv)
        if classic_s is None:
            return  # nothing drafts before a classic step was timed
        token_s = classic_s / batch
        riding = outcome.riding_rows
        base_s = self.cost.step_value_s(batch, riding, kv, outcome.prefill_kv, classic_s)
        if riding:
            base_s += self.cost.drafting_s(outcome.fixed_widths)
        shared_s = base_s - classic_s  # what the rows that ride along are worth to everybody
        chosen = [part for part in outcome.rounds if not part.fixed]
        drafted = any(part.k for part in chosen)
        value_s = base_s + token_s * (sum([part.emitted for part in chosen]) - len(chosen))
        if drafted:
            self.ledger.charge(round_s=outcome.round_s, value_s=value_s)
        else:
            # A classic step is worth what it took, however wrong the estimate is.
            value_s = min(value_s, max(outcome.round_s - outcome.draft_s, 0.0))
            self.ledger.leak(value_s=value_s, lost_s=outcome.draft_s)
        if batch == 1:
            return
        for part in outcome.rounds:
            budget = self.requests[part.request].neighbour
            if drafted:
                worth_s = shared_s + classic_s * part.emitted
                budget.charge(round_s=outcome.round_s, value_s=worth_s)
            else:
                budget.leak(value_s=classic_s)
