"""The loss budget in decisions and reports, and widths that are no choice of the policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slipstream.policy.acceptance import Acceptance, Acceptances
from slipstream.policy.base import StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.simulator import run
from tests.policy.worlds import calibrate, flat_world, outcome, step_outcome, view


def test_a_width_that_somebody_asked_for_is_learned_from_and_not_charged() -> None:
    policy = MeasuredPolicy()
    run(flat_world(0.5, free=False), policy, random.Random(0), num_rounds=10)
    owed, seen = policy.ledger.debt_s, policy.cost.verify.samples(8)
    asked = replace(outcome(7, 0, 0.02), fixed=True)
    policy.observe_step(step_outcome([asked], 0.02))
    assert policy.ledger.debt_s <= owed
    assert policy.cost.verify.samples(8) > seen
    policy.observe_step(step_outcome([outcome(7, 0, 0.02)], 0.02))
    assert policy.ledger.debt_s > owed


def test_a_width_that_somebody_asked_for_is_what_the_decision_says() -> None:
    policy = MeasuredPolicy()
    decisions = policy.choose_step(StepView(rounds=[view(fixed_k=5), view(request=2, fixed_k=0)]))
    assert [decision.k for decision in decisions] == [5, 0]
    assert decisions[0].reason.startswith("fixed")


def test_fixed_rows_ride_along_like_those_of_a_prompt() -> None:
    """A neighbour's fixed verify is in the step whatever others draft: they pay for theirs only."""
    policy = MeasuredPolicy()
    world = flat_world(0.9, free=False)
    calibrate(policy, world)
    run(world, policy, random.Random(0), num_rounds=100)
    for _ in range(5):
        policy.observe_step(
            step_outcome([outcome(0, 0, 0.01), outcome(0, 0, 0.01, request=1)], 0.01)
        )
    step = StepView(rounds=[view(), view(request=1, fixed_k=4)])
    decisions = policy.choose_step(step)
    assert decisions[1].k == 4
    assert decisions[0].k > 0
    owed = policy.ledger.debt_s
    parts = [outcome(4, 4, 0.011), replace(outcome(4, 0, 0.011, request=1), fixed=True)]
    policy.observe_step(step_outcome(parts, 0.011))
    assert policy.ledger.debt_s <= owed


def test_what_the_budget_does_not_allow_is_narrowed_before_it_is_given_up() -> None:
    policy = MeasuredPolicy()
    policy.acceptance = Acceptances(Acceptance(), Acceptance([0.95]))
    calibrate(policy, flat_world(0.95, per_row=0.3, free=False))
    policy.cost.drafting.calibrate(1, 0.0002)
    for _ in range(3):
        policy.observe(outcome(0, 0, 0.01))
    wide = policy.choose(view())
    assert wide.k >= 5
    classic_s = policy.cost.classic_s(1, 100) or 0.0
    policy.ledger.debt_s = (8.0 - 0.8) * classic_s  # a wide round may lose more than is left
    less = policy.choose(view())
    assert 0 < less.k < wide.k
    assert less.reason.startswith("enable within the loss budget: ")
    worst_s = policy.cost.worst_s(less.k + 1, 100, [less.k], classic_s)
    value_s = policy.cost.value_s(1, 100) or 0.0
    assert policy.ledger.may_start(worst_s=worst_s, anchors_s=value_s, classic_s=classic_s)
    policy.ledger.debt_s = 8.0 * classic_s
    assert policy.choose(view()).k == 0


@pytest.mark.parametrize("free", [False, True])
def test_a_report_says_that_the_budget_is_spent(free: bool) -> None:
    policy = MeasuredPolicy(paid=not free)
    world = flat_world(0.8, free=free)
    calibrate(policy, world)
    run(world, policy, random.Random(0), num_rounds=50, request=7)
    request = policy.request(7)
    assert request.verdict == "enable"
    policy.ledger.debt_s = 5.0
    assert request.verdict == "decline"
    assert request.reason.startswith("decline: the loss budget is spent: 5000.0 of ")
    assert request.predicted_speedup is not None


def test_a_report_tells_a_resting_drafter_from_one_with_nothing_to_offer() -> None:
    policy = MeasuredPolicy(paid=False)
    for _ in range(4):
        policy.observe_step(step_outcome([outcome(0, 0, 0.01)], 0.01))
    assert policy.request(0).reason == "decline: the drafter found nothing to offer"
    policy.ledger.debt_s = 0.07
    policy.observe_step(
        StepOutcome(
            rounds=[outcome(0, 0, 0.01)], draft_s=0.0, peek_s=0.001, verify_s=0.01, round_s=0.011
        )
    )
    assert policy.rests
    assert policy.request(0).reason.startswith("decline: lookups rest until less is owed")


def test_a_lookup_that_was_slow_once_is_asked_again_and_believed() -> None:
    """One cold lookup dearer than the leak, while much is owed, must not silence it for ever."""
    policy = MeasuredPolicy(paid=False)
    for _ in range(4):
        policy.observe_step(step_outcome([outcome(0, 0, 0.01)], 0.01))
    policy.ledger.debt_s = 0.07

    def step(peek_s: float) -> None:
        policy.observe_step(
            StepOutcome(
                rounds=[outcome(0, 0, 0.01)],
                draft_s=0.0,
                peek_s=peek_s,
                verify_s=0.01,
                round_s=0.01 + peek_s,
            )
        )

    step(0.0003)
    asked = 0
    for _ in range(400):
        asked += policy.may_peek
        step(0.00001 if policy.may_peek else 0.0)
    assert not policy.rests
    assert asked > 200


def test_a_classic_step_that_drafted_rounds_belie_is_timed_again() -> None:
    """A machine that was busy when the classic step was timed, and is not any more."""
    policy = MeasuredPolicy()
    for _ in range(3):
        policy.observe(outcome(0, 0, 0.03))
    for rows in range(1, 9):
        policy.cost.calibrate(rows, 100, 0.005)
    waited = 0
    while policy.choose(view()).k:
        policy.observe(outcome(policy.choose(view()).k, 0, 0.005))
        waited += 1
    assert policy.choose(view()).reason == "classic: its time is measured again"
    assert waited <= 8


@pytest.mark.parametrize("peek_steps", [0.2, 3.0, 40.0])
def test_a_drafter_that_is_free_in_name_only_costs_one_percent_however_slow(
    peek_steps: float,
) -> None:
    """Beside the capacity and the first lookup, which nobody could know to be slow."""
    policy = MeasuredPolicy(paid=False)
    step_s, spent, count = 0.01, 0.0, 20_000
    for _ in range(count):
        peek_s = peek_steps * step_s if policy.may_peek else 0.0
        spent += peek_s
        if not policy.pass_by([0], 100, peek_s=peek_s, round_s=step_s + peek_s):
            policy.observe_step(
                StepOutcome(
                    rounds=[outcome(0, 0, step_s)],
                    draft_s=0.0,
                    peek_s=peek_s,
                    verify_s=step_s,
                    round_s=step_s + peek_s,
                )
            )
    # Three steps go by before a classic step is known, and lookups are not charged till then.
    assert spent <= 0.007 * count * step_s + 8 * step_s + 4 * peek_steps * step_s


def decided(k: int, accepted: int, round_s: float, *, choose_s: float = 0.001) -> StepOutcome:
    """Return a step of a free drafter in which widths were chosen."""
    return StepOutcome(
        rounds=[outcome(k, accepted, round_s, paid=False)],
        draft_s=0.0,
        choose_s=choose_s,
        verify_s=round_s - choose_s,
        round_s=round_s,
    )


def in_debt() -> MeasuredPolicy:
    """Return a policy that owes more than half of its capacity, and knows what choosing takes."""
    policy = MeasuredPolicy(paid=False)
    for _ in range(4):
        policy.observe_step(decided(0, 0, 0.011))
    policy.ledger.debt_s = 0.06
    return policy


def test_a_choice_that_came_to_nothing_rests_until_the_leak_has_paid_for_it() -> None:
    policy = in_debt()
    policy.observe_step(decided(0, 0, 0.011))
    waited = 0
    while not policy.may_decide:
        if not policy.pass_by([0], 100, round_s=0.01):
            policy.observe_step(step_outcome([outcome(0, 0, 0.01)], 0.01))
        waited += 1
    assert waited * 0.25 * 0.007 * 0.01 >= 0.001
    assert policy.rests
    # The next choice is looked at as well, however little it did.
    assert not policy.pass_by([0], 100, choose_s=0.001, round_s=0.011)


def test_a_choice_to_draft_is_followed_by_the_next_whatever_came_of_it() -> None:
    """Drafts that failed by bad luck must not put a drafter that pays to rest."""
    policy = in_debt()
    for accepted in (4, 0):
        policy.observe_step(decided(4, accepted, 0.015))
        policy.ledger.debt_s = 0.06
        assert policy.may_decide
    policy.observe_step(decided(0, 0, 0.011))
    assert not policy.may_decide


def test_what_deciding_takes_is_no_part_of_a_classic_step() -> None:
    """slipstream bench: 0.3 ms of policy in a step of 5 ms hid losses of 5 % at batch 4."""
    policy = MeasuredPolicy(paid=False)
    for _ in range(8):
        policy.observe_step(decided(0, 0, 0.0115, choose_s=0.0015))
    assert policy.cost.classic_s(1, 100) == pytest.approx(0.01)
    owed = policy.ledger.debt_s
    policy.observe_step(decided(0, 0, 0.0115, choose_s=0.0015))
    assert policy.ledger.debt_s - owed == pytest.approx(0.0015 - 0.007 * 0.01, rel=0.01)
