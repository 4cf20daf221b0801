"""A pairing with a free and a paid drafter: each round drafts with the one that makes it faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.policy.base import StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.draft_cost import DraftCost
from tests.policy.worlds import calibrate, flat_world, outcome, step_outcome, view

DRAFT_S = 0.0005  # a drafted token, of a step of 10 ms


def pairing(*, free: float, paid: float) -> MeasuredPolicy:
    """Return a policy that knows its costs and so much of each drafter's first drafts."""
    policy = MeasuredPolicy()
    calibrate(policy, flat_world(0.5, free=False))
    for k in range(1, 8):
        policy.cost.drafting.calibrate(k, DRAFT_S * k)
    for _ in range(3):
        policy.observe(outcome(0, 0, 0.01))
    for known, chance in zip(policy.acceptance, (free, paid), strict=True):
        for trial in range(100):
            hits = 4 if (7 * trial) % 10 < 10 * chance else 0
            known.observe(4, hits, hits + 1)
    policy.forget(0)
    return policy


@pytest.mark.parametrize(("free", "paid", "who"), [(0.9, 0.5, False), (0.3, 0.8, True)])
def test_a_round_drafts_with_the_one_that_makes_it_faster(
    free: float, paid: float, who: bool
) -> None:
    decision = pairing(free=free, paid=paid).choose(view(proposed=7))
    assert decision.k > 0
    assert decision.paid is who


def test_equal_records_go_to_the_one_that_costs_nothing() -> None:
    assert not pairing(free=0.8, paid=0.8).choose(view(proposed=7)).paid


def test_without_an_offer_the_paid_drafter_drafts_and_never_beyond_its_own_ceiling() -> None:
    policy = pairing(free=0.9, paid=0.8)
    decision = policy.choose(replace(view(), paid_ceiling=2))
    assert decision.paid
    assert decision.k <= 2
    assert policy.choose(replace(view(), paid_ceiling=0)).k == 0


def test_each_has_a_record_of_its_own() -> None:
    policy = MeasuredPolicy()
    policy.observe(replace(outcome(4, 4, 0.01, paid=False), request=3))
    policy.observe(replace(outcome(4, 0, 0.01), request=3))
    free, paid = policy.requests[3].acceptance
    assert (free.trials(4), paid.trials(4)) == (1.0, 0.0)
    assert free.chances[0] > paid.chances[0]


def test_what_was_offered_while_the_other_drafted_is_scored() -> None:
    policy = MeasuredPolicy()
    policy.observe(replace(outcome(2, 2, 0.01), scores=((1, True), (2, True), (3, False))))
    free, paid = policy.requests[0].acceptance
    assert (free.trials(3), paid.trials(2), paid.trials(3)) == (1.0, 1.0, 0.0)


def test_in_a_batch_each_sequence_settles_on_its_own() -> None:
    policy = pairing(free=0.8, paid=0.8)
    for _ in range(3):
        parts = [outcome(0, 0, 0.01, request=index) for index in range(2)]
        policy.observe_step(step_outcome(parts, 0.01))
    step = StepView(rounds=[view(request=0, proposed=7), view(request=1)])
    offered, asked = policy.choose_step(step)
    assert offered.k > 0
    assert asked.k > 0
    assert (offered.paid, asked.paid) == (False, True)


@pytest.mark.parametrize(("free", "paid", "who"), [(0.9, 0.3, False), (0.3, 0.9, True)])
def test_a_width_of_its_own_is_drafted_by_whoever_is_likelier_right(
    free: float, paid: float, who: bool
) -> None:
    decision = pairing(free=free, paid=paid).choose(view(proposed=7, fixed_k=3))
    assert (decision.k, decision.paid) == (3, who)


def test_drafting_together_has_times_of_its_own() -> None:
    """One call that drafts for four sequences is not four calls."""
    cost = DraftCost()
    cost.calibrate(4, 0.0008)
    parts = [replace(outcome(4, 0, 0.01), request=index) for index in range(4)]
    together = StepOutcome(rounds=parts, draft_s=0.0012, verify_s=0.01, round_s=0.0112)
    cost.observe(together, 1, observed_before=True)
    assert cost.drafting_s([4]) == pytest.approx(0.0008)
    assert cost.drafting_s([4, 4, 4, 4]) == pytest.approx(0.0012)
    assert cost.drafting_s([4, 0, 0, 0]) == pytest.approx(0.0008)
