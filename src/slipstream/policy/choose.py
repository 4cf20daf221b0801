"""The measured policy: how many tokens each round drafts, from what was measured.

`choose_step` is pure and `observe_step` the only mutation, so a recorded run can be replayed
through it. In order: a classic step that is due is taken; else the width with the best speedup
runs, if it leaves k = 0 by a margin and its worst case fits the loss budget; else a width that
might be better is tried now and then, on the same budget; else a classic step, beside which a paid
drafter may be shadowed. A pairing has free drafters, a paid one, or both: then each round drafts
with the one that makes it faster. The state diagram and every constant's origin: docs/policy.md.

One policy serves one pairing of target and drafter; requests are told apart by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.policy.acceptance import PRIOR_TRIALS, Acceptance, Acceptances
from slipstream.policy.accounts import Accounts
from slipstream.policy.base import Decision, RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.cost import DEFAULT_EDGES
from slipstream.policy.explore import Explorer
from slipstream.policy.ledger import Ledger
from slipstream.policy.options import Limits, better_is_paid
from slipstream.policy.plan import Plan, plan_step, refuse
from slipstream.policy.request_policy import RequestPolicy
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.types import MAX_K

# Share of the gain that classic steps may cost while drafting pays, and their cadence in rounds:
# often enough that heat shows within a second or two, seldom enough at small gains.
CLASSIC_SHARE = 0.005
CLASSIC_EVERY = (48, 512)
# A round that drafts is believed to take less than this share of a classic step only for so many
# rounds: then the classic step is timed again, whatever its cadence.
CLASSIC_TOO_SLOW = 0.9
CLASSIC_AGAIN = 8
# A classic step that nothing forced is looked at in full once the last look is so many steps old: a
# look takes 90 us, a step that is classic only to be timed a good part of a step.
CLASSIC_LOOK = 24


FIXED = "fixed: this k was asked for"
NO_DRAFTS = Limits(0, 0)
NARROWED = "enable within the loss budget"


class MeasuredPolicy:
    """Sizes the rounds of every request of one pairing.

    Args:
        paid: the pairing has a drafter that takes time for each token. What free ones offer, as
            n-gram lookup does, is there before k is chosen; see `RoundView.proposed`.
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
        paid: bool = True,
        edges: Sequence[int] = DEFAULT_EDGES,
        bandwidth_bound: bool = False,
        max_k: int = MAX_K,
        pad_to: int = 1,
    ) -> None:
        self.paid = paid
        self.max_k = max_k
        self.cost = RoundCost(edges, bandwidth_bound=bandwidth_bound, pad_to=pad_to)
        self.acceptance = Acceptances.new()
        self.ledger = Ledger()
        self.requests: dict[int, RequestState] = {}
        self.rounds = 0
        self._peek_every = 1  # rounds
        self._decided_at, self._decide_every = 0, 1  # rounds
        self._accounts = Accounts(self.cost, self.ledger)
        self._explorer = Explorer(self.cost, self.ledger)

    def choose(self, view: RoundView) -> Decision:
        """Return the k of a round that is alone in its step."""
        return self.choose_step(StepView(rounds=(view,)))[0]

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in a round that was alone in its step."""
        paid = outcome.paid or outcome.shadow
        self.observe_step(
            StepOutcome(
                rounds=(outcome,),
                draft_s=outcome.draft_s if paid else 0.0,
                peek_s=0.0 if paid else outcome.draft_s,
                verify_s=outcome.verify_s,
                round_s=outcome.round_s,
            )
        )

    def choose_step(self, view: StepView) -> list[Decision]:
        """Return the decision of each round of a step. Pure."""
        if not any([part.fixed_k for part in view.rounds]):  # noqa: C419 - in every step
            return self._choose(view)
        fixed = [self._fixed(part) for part in view.rounds]
        paid = [
            (each.k, part.behind)
            for each, part in zip(fixed, view.rounds, strict=True)
            if each is not None and each.paid
        ]
        decisions = self._choose(
            replace(
                view,
                fixed_drafts=[k for k, _ in paid],
                fixed_behind=sum([behind for _, behind in paid]),
            )
        )
        return [own or decision for own, decision in zip(fixed, decisions, strict=True)]

    def _choose(self, view: StepView) -> list[Decision]:
        """Return the decisions of rounds whose width is the policy's choice, 0 for the others."""
        limits = [self._limits(part) for part in view.rounds]
        if not any([max(limit) for limit in limits]):  # noqa: C419 - in every step
            return self._classic(view, "decline: no draft is offered, or none fits")
        batch = len(view.rounds)
        kv = view.prefill_kv + sum([part.context_len for part in view.rounds])
        if not self.cost.knows_classic(batch, kv - view.prefill_kv):
            return self._classic(view, f"unmeasured: timing the classic step of batch {batch}")
        states = [self._state(part.request) for part in view.rounds]
        plan = plan_step(self.cost, view, states, limits, kv)
        if plan is None:
            return self._classic(view, "unmeasured: no step with these prompt rows was timed")
        if plan.num_rows and self._classic_stale(plan, kv - view.prefill_kv):
            return self._classic(view, "classic: its time is measured again")
        probe = self._explorer.probe(
            plan, view, states, limits, kv, self.rounds, explored=self._explored(view)
        )
        for what, wanted in (("probe", probe), ("enable", plan)):
            if wanted is not None and wanted.num_rows:
                refusal = refuse(wanted, self.ledger, states)
                if refusal is None:
                    return wanted.decisions(what)
                if what == "enable":
                    less = self.affordable(plan, view, states, limits, kv)
                    return less.decisions(NARROWED) if less else self._classic(view, refusal)
        return self._declined(view, plan, states, limits, kv)

    def _explored(self, view: StepView) -> bool:
        """Tell whether the paid drafter's record outweighs its prior, or it need not read."""
        return self.acceptance.paid.trials(1) >= PRIOR_TRIALS or not any(
            [part.behind for part in view.rounds]  # noqa: C419 - in every step
        )

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
        self._accounts.charge(outcome, self.requests)
        observed_before = self._accounts.last is not None
        self.cost.observe(outcome, self.rounds, observed_before=observed_before)
        for part in outcome.rounds:
            self.requests[part.request].observe(part, self.acceptance, self.rounds)
        self._accounts.last = outcome
        self._peek_every = self._accounts.peek_every(outcome)
        decide_every = self._accounts.decide_every(outcome)
        if outcome.choose_s > 0.0:
            self._decided_at, self._decide_every = self.rounds, decide_every
        elif decide_every == 1:  # there is room again
            self._decide_every = 1

    @property
    def may_peek(self) -> bool:
        """Whether a free drafter should be asked in this step."""
        every = self._peek_every
        return every == 1 or self._now % every == 0

    @property
    def may_decide(self) -> bool:
        """Whether widths should be chosen in this step, if there is something to draft."""
        every = self._decide_every
        return every == 1 or self._now - self._decided_at >= every

    @property
    def rests(self) -> bool:
        """Whether it looks for drafts in some steps only, since too much is owed."""
        return self._peek_every > 1 or self._decide_every > 1

    @property
    def _now(self) -> int:
        return self.rounds + self._accounts.num_waiting

    def pass_by(
        self,
        requests: Sequence[int],
        kv_tokens: int,
        *,
        peek_s: float = 0.0,
        choose_s: float = 0.0,
        observe_s: float = 0.0,
        round_s: float,
    ) -> bool:
        """Take in a classic step that has nothing to teach, in next to no time.

        Such a step drafted nothing, and nothing was offered or scored. A few in a row are accounted
        for together by the next `settle`.

        Args:
            requests: those that took part, in the order of the step before.
            kv_tokens: KV positions that they read.
            peek_s, choose_s, observe_s, round_s: seconds; see `StepOutcome`.

        Returns:
            False if it has something to teach after all: then `observe_step` wants it.
        """
        if choose_s > 0.0 and self._decide_every > 1:
            return False  # the next choice is as far off as this one was dear
        if self._accounts.last is not None:  # the first step since a look
            level = self.cost.classic.level(len(requests), kv_tokens)
            if level is None or self.rounds - level.seen_at >= CLASSIC_LOOK:
                return False
        return self._accounts.pass_by(
            requests,
            kv_tokens,
            asked_s=peek_s + choose_s,
            spent_s=peek_s + choose_s + observe_s,
            round_s=round_s,
        )

    def settle(self) -> None:
        """Account for the steps that passed by. An engine does so before it asks for a choice."""
        self.rounds += self._accounts.settle(self.requests)

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
            "acceptance": [known.state() for known in self.acceptance],
            "debt_s": self.ledger.debt_s,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        self.cost.restore(state["cost"])
        self.acceptance = Acceptances(*map(Acceptance, state["acceptance"]))
        self.ledger.debt_s = float(state["debt_s"])

    def forget_costs(self) -> None:
        """Let go of all times, as when the machine is found to be another; not of the debt."""
        self.cost = RoundCost(
            self.cost.verify.edges,
            bandwidth_bound=self.cost.bandwidth_bound,
            pad_to=self.cost.pad_to,
        )
        self._accounts = Accounts(self.cost, self.ledger)
        self._explorer = Explorer(self.cost, self.ledger)

    def _limits(self, view: RoundView, *, fixed: bool = False) -> Limits:
        """Return the largest k of a round; 0 where it is not the policy's choice."""
        if view.fixed_k is not None and not fixed:
            return NO_DRAFTS
        ceiling = min(view.ceiling, view.remaining - 1, self.max_k)
        if not self.paid:
            return Limits(min(view.proposed, ceiling), 0)
        paid = ceiling if view.paid_ceiling is None else min(view.paid_ceiling, ceiling)
        return Limits(min(view.proposed, ceiling), paid)

    def _fixed(self, view: RoundView) -> Decision | None:
        """Return the decision of a round whose width is no choice of the policy's."""
        if not view.fixed_k:
            return None
        known = self._state(view.request).acceptance
        paid = better_is_paid(known, self._limits(view, fixed=True), view.fixed_k)
        return Decision(k=view.fixed_k, reason=FIXED, paid=paid)

    def _state(self, request: int) -> RequestState:
        """Return what is known of a request, or what its first round will start from."""
        state = self.requests.get(request)
        return state or RequestState.start(self.acceptance, self.rounds)

    def _classic_stale(self, plan: Plan, kv_tokens: int) -> bool:
        """Tell whether the classic step should be timed again."""
        level = self.cost.classic.level(plan.batch, kv_tokens)
        if level is None:
            return True
        age = self.rounds - level.seen_at
        # No round that drafts is faster than a classic step, unless the machine has changed since.
        if plan.round_s < CLASSIC_TOO_SLOW * plan.base_s and age >= CLASSIC_AGAIN:
            return True
        lost_s = (plan.top.speedup - 1.0) * plan.base_s
        wanted = lost_s / (CLASSIC_SHARE * plan.round_s)
        return age >= min(max(wanted, CLASSIC_EVERY[0]), CLASSIC_EVERY[1])

    def _classic(self, view: StepView, reason: str, shadow: int = 0) -> list[Decision]:
        return [Decision(k=0, reason=reason, shadow=shadow) for _ in view.rounds]

    def _declined(
        self, view: StepView, plan: Plan, states: list[RequestState], limits: list[Limits], kv: int
    ) -> list[Decision]:
        """Return classic steps, and the shadows that the ledger allows beside them."""
        reason = plan.reason("decline")
        if not self.paid:
            return self._classic(view, reason)
        return [
            Decision(
                k=0,
                reason=reason,
                shadow=self._explorer.shadow(
                    plan, state, limit.paid, kv, self.rounds, behind=part.behind
                ),
            )
            for part, state, limit in zip(view.rounds, states, limits, strict=True)
        ]
