"""The measured policy: how many tokens each round drafts, from what was measured.

`choose_step` is pure and `observe_step` the only mutation, so a recorded run can be replayed
through it. What is decided is `decide`'s; this module keeps what decisions go by. Every step is
charged at once, and what it teaches is learned a few steps at a time, since in a live engine each
look at what is known is one at memory that a forward has just swept out of the caches. A pairing
has free drafters, a paid one, or both. The state diagram and every constant's origin:
docs/policy.md.

One policy serves one pairing of target and drafter; requests are told apart by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.policy.acceptance import Acceptance, Acceptances
from slipstream.policy.accounts import Accounts
from slipstream.policy.base import (
    Decision,
    Expected,
    RoundOutcome,
    RoundView,
    StepOutcome,
    StepView,
)
from slipstream.policy.cost import DEFAULT_EDGES
from slipstream.policy.decide import Decider, classic
from slipstream.policy.ledger import Ledger
from slipstream.policy.level import CLAMP
from slipstream.policy.options import Limits, better_is_paid
from slipstream.policy.request_policy import RequestPolicy
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import DOUBT_AFTER, RoundCost
from slipstream.policy.terms import LEARN_EVERY, LEARN_LOSS, Terms
from slipstream.types import MAX_K

# So many rounds in a row that took this many times what they were expected to take say that the
# machine has become slower: then the classic step is timed again.
SLOW_ROUNDS, SLOW = 3, CLAMP
# A classic step that nothing forced is looked at in full once the last look is so many steps old: a
# look takes 90 us, a step that is classic only to be timed a good part of a step.
CLASSIC_LOOK = 24

FIXED = "fixed: this k was asked for"
NO_DRAFTS = Limits(0, 0)


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
        self.decider = Decider(self.cost, self.ledger, paid=paid)
        self._terms: Terms | None = None
        # Steps that were charged and not learned from: each one's number, what it did, and whether
        # the one before it was observed in full.
        self._unlearned: list[tuple[int, StepOutcome, bool]] = []
        self._learned_owing_s = 0.0  # the balance then
        self._slow_rounds = 0

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
        if not any([limit.free or limit.paid for limit in limits]):  # noqa: C419 - in every step
            return classic(view, "decline: no draft is offered, or none fits")
        states = [self._state(part.request) for part in view.rounds]
        terms = self._terms
        if terms is not None and not terms.cover_view(view):
            terms = None
        return self.decider.decide(view, states, limits, terms, self.acceptance, self.rounds)

    def observe_step(self, outcome: StepOutcome) -> Expected:
        """Take in a step: charge the ledger raw time, then learn from it, now or soon.

        Returns:
            What was expected of it.
        """
        rounds = outcome.rounds
        if not rounds:
            return Expected(None, None, None)
        accounts, terms = self._accounts, self._terms
        if accounts.num_waiting:
            self.settle()
        self.rounds = now = self.rounds + 1
        if terms is not None and not terms.cover(outcome):
            self.learn()
            terms = None
        drafted = False
        for part in rounds:
            state = self.requests.get(part.request)
            if state is None:
                state = self.requests[part.request] = self._state(part.request)
            state.follow(part, now)
            drafted = drafted or part.k > 0
        expected = self.cost.expected(outcome) if terms is None else terms.expected(outcome)
        accounts.charge(outcome, self.requests, terms, expected.round_s)
        self._unlearned.append((now, outcome, accounts.last is not None))
        accounts.last = outcome
        is_slow = drafted and self._is_slow(outcome.round_s, expected.round_s)
        if terms is not None and now - terms.classic_seen_at < DOUBT_AFTER:
            is_slow = False  # it was timed just now
        waits = drafted or (terms is not None and terms.may_wait(now))
        if (
            is_slow
            or not waits
            or terms is None
            or len(self._unlearned) >= LEARN_EVERY
            or self.ledger.balance_s - self._learned_owing_s > LEARN_LOSS * terms.classic_s
        ):
            self.learn()
            if is_slow and self.cost.doubt_classic(outcome, now):
                self._slow_rounds = 0
            terms = self._terms = accounts.terms(outcome)
        elif not drafted and accounts.is_strained(outcome, terms):
            self.learn()
            terms = self._terms = accounts.terms(outcome)
        if outcome.choose_s > 0.0:
            self._decided_at = now
        if self.ledger.debt_s <= 0.0:
            self._peek_every = self._decide_every = 1
            return expected
        self._peek_every = accounts.peek_every(outcome, terms)
        decide_every = accounts.decide_every(outcome, terms)
        if outcome.choose_s > 0.0 or decide_every == 1:  # there is room again
            self._decide_every = decide_every
        return expected

    def learn(self) -> None:
        """Learn from what was observed and not learned from; `observe_step` does so in time."""
        self._terms = None
        self._learned_owing_s = self.ledger.balance_s
        for now, outcome, observed_before in self._unlearned:
            self.cost.observe(outcome, now, observed_before=observed_before)
            for part in outcome.rounds:
                self.requests[part.request].learn(part, self.acceptance, now)
        self._unlearned.clear()

    def _is_slow(self, round_s: float, expected_s: float | None) -> bool:
        """Count a round that drafted; tell whether enough in a row took longer than expected."""
        if expected_s is not None:
            self._slow_rounds = self._slow_rounds + 1 if round_s > SLOW * expected_s else 0
        return self._slow_rounds >= SLOW_ROUNDS

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
        if self._terms is not None and not self._terms.is_settled:
            return False
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
        self.learn()
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
        """Let go of all times, as when the machine is found to be another; not of the debt.

        Savings go too: they are seconds of the other machine, and many steps of a faster one.
        """
        self.ledger.saved_s = 0.0
        self.cost = RoundCost(
            self.cost.verify.edges,
            bandwidth_bound=self.cost.bandwidth_bound,
            pad_to=self.cost.pad_to,
        )
        self._accounts = Accounts(self.cost, self.ledger)
        self.decider = Decider(self.cost, self.ledger, paid=self.paid)
        self._terms = None
        self._unlearned.clear()

    def _limits(self, view: RoundView, *, fixed: bool = False) -> Limits:
        """Return the largest k of a round; 0 where it is not the policy's choice."""
        if view.fixed_k is not None and not fixed:
            return NO_DRAFTS
        ceiling = min(view.ceiling, view.remaining - 1, self.max_k)
        paid = 0
        if self.paid:
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
