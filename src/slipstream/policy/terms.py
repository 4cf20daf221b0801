"""What holds until more is learned: what steps of some requests are worth, and their plans.

In a live engine every forward sweeps the caches, and what the policy does then takes as long as it
touches memory, many times what it takes in a loop. So what is observed is learned from a few steps
at a time, and between two such times nothing that a decision rests on moves but what is owed and
the number of the round. Terms are what was worked out in between: plain numbers to charge steps by,
and the plans of earlier rounds for rounds like them.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.policy.base import Decision, Expected, StepOutcome, StepView
from slipstream.policy.options import Limits
from slipstream.policy.plan import Plan
from slipstream.policy.round_cost import RoundCost

# Steps that are learned from together, and as many rounds old a classic step's time is before the
# next one is learned from at once.
LEARN_EVERY = 16
# Classic steps that steps may lose before they are learned from at once: so many rounds of wrong
# drafts would else spend the budget that a drafter needs to be tried again.
LEARN_LOSS = 1.0

Key = tuple[bool, ...]


class Standing:
    """A plan that the budgets allowed, or that declined to draft, with its decisions.

    Attributes:
        limits: of the view that it was made for.
        behind: tokens that the paid drafter had to read first, of each round.
        max_rows: drafted rows that its step had room for.
        due_at: the round in which something else is due: a classic step, or a shadow beside one.
        due_unowed_at: the same for as long as nothing is owed to the loss budget.
        probe_after: rounds without a change of width after which trials are thought about.
    """

    __slots__ = (
        "behind",
        "decisions",
        "due_at",
        "due_unowed_at",
        "limits",
        "max_rows",
        "plan",
        "probe_after",
    )

    def __init__(
        self,
        plan: Plan,
        decisions: list[Decision],
        limits: Sequence[Limits],
        view: StepView,
        *,
        due_at: float,
        due_unowed_at: float,
        probe_after: int,
    ) -> None:
        self.plan = plan
        self.decisions = decisions
        self.limits = limits
        self.behind = [part.behind for part in view.rounds]
        self.max_rows = view.max_draft_rows
        self.due_at = due_at
        self.due_unowed_at = due_unowed_at
        self.probe_after = probe_after

    def serves(self, view: StepView, limits: Sequence[Limits]) -> bool:
        """Tell whether it is the plan for a view of the same kind with other limits too.

        It is for narrower ones that its widths are within: what was no better than them before is
        none now. Where more is offered a wider round may pay.
        """
        if view.max_draft_rows != self.max_rows:
            return False
        as_planned = True
        for decision, (free, paid), known, part, behind in zip(
            self.decisions, limits, self.limits, view.rounds, self.behind, strict=True
        ):
            if free > known.free or paid > known.paid:
                return False
            if decision.k > (paid if decision.paid else free):
                return False
            if part.behind != behind:
                as_planned = False
        return as_planned or self._outlasts(view, limits)

    def _outlasts(self, view: StepView, limits: Sequence[Limits]) -> bool:
        """Tell whether it still holds though drafters have fallen behind, or further than planned.

        What would not be drafted is dearer then, and the rest costs what it did. It does not hold
        where just that drafter would draft, or is not asked only because its rows went to others:
        dearer it may lose them to a free one. One that has only now fallen behind is tried and
        shadowed by other rules than before.
        """
        alone = len(limits) == 1
        for decision, prefers_paid, limit, part, behind in zip(
            self.decisions, self.plan.paid, limits, view.rounds, self.behind, strict=True
        ):
            if part.behind == behind:
                continue
            if part.behind < behind or behind == 0:
                return False
            if prefers_paid and (decision.k or not (alone or limit.free == 0)):
                return False
        return True


class Terms:
    """What steps of the same requests in the same octave of context are worth.

    Attributes:
        requests: their numbers, in the order of the step.
        kv_ends: KV tokens of the next octave.
        classic_s, value_s: a classic step of theirs, and its lower confidence bound.
        classic_seen_at: the round in which one was last learned from.
        is_settled: the last one took about what the ones before it took.
        plans: by what may be drafted at all, see `key_of`.
    """

    __slots__ = (
        "_cost",
        "_expected",
        "classic_s",
        "classic_seen_at",
        "is_settled",
        "kv_ends",
        "plans",
        "requests",
        "value_s",
    )

    def __init__(
        self,
        requests: list[int],
        kv_ends: int,
        *,
        classic_s: float,
        value_s: float,
        classic_seen_at: int,
        is_settled: bool,
        cost: RoundCost,
    ) -> None:
        self.requests = requests
        self.kv_ends = kv_ends
        self.classic_s = classic_s
        self.value_s = value_s
        self.classic_seen_at = classic_seen_at
        self.is_settled = is_settled
        self.plans: dict[Key, Standing] = {}
        self._cost = cost
        self._expected: dict[tuple[int, ...], Expected] = {}  # by k, negative for paid drafts

    def may_wait(self, now: int) -> bool:
        """Tell whether a classic step of theirs need not be learned from at once."""
        return self.is_settled and now - self.classic_seen_at < LEARN_EVERY

    def cover_view(self, view: StepView) -> bool:
        """Tell whether a step is of their kind before it is made."""
        if view.prefill_rows:
            return False
        kv_tokens, requests = 0, self.requests
        rounds = view.rounds
        if len(rounds) != len(requests):
            return False
        for part, request in zip(rounds, requests, strict=True):
            if part.request != request or part.fixed_k:
                return False
            kv_tokens += part.context_len
        return kv_tokens < self.kv_ends

    def cover(self, outcome: StepOutcome) -> bool:
        """Tell whether a step is of their kind, and teaches nothing that cannot wait."""
        if outcome.prefill_rows:
            return False
        kv_tokens, requests = 0, self.requests
        rounds = outcome.rounds
        if len(rounds) != len(requests):
            return False
        for part, request in zip(rounds, requests, strict=True):
            if part.request != request or part.fixed or part.shadow or part.shadow_scores:
                return False
            if part.caught_up:
                return False
            kv_tokens += part.context_len
        return kv_tokens < self.kv_ends

    def expected(self, outcome: StepOutcome) -> Expected:
        """Return what was expected of a step that they cover."""
        widths = tuple([-part.k if part.paid else part.k for part in outcome.rounds])
        expected = self._expected.get(widths)
        if expected is None:
            expected = self._expected[widths] = self._cost.expected(outcome)
        return expected


def key_of(limits: Sequence[Limits], *, drafted: bool) -> Key:
    """Return what tells plans apart: who may draft for each sequence, and who drafted before.

    Args:
        drafted: some sequence drafted in its last round, which makes it easier to go on.
    """
    key = [drafted]
    for free, paid in limits:
        key += (free > 0, paid > 0)
    return tuple(key)
