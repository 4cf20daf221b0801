"""Steps that pass by: how many, at what cost, and that the sums are those of single steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream.policy.base import StepOutcome
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.quiet import MAX_QUIET
from tests.policy.worlds import outcome, step_outcome

STEP_S = 0.01


def passes(
    policy: MeasuredPolicy,
    requests: Sequence[int] = (0,),
    kv_tokens: int = 100,
    *,
    peek_s: float = 0.0,
    thinking_s: float = 0.0,
) -> bool:
    """Tell whether a classic step may pass by."""
    spent_s = peek_s + thinking_s
    return policy.pass_by(
        list(requests), kv_tokens, peek_s=peek_s, observe_s=thinking_s, round_s=STEP_S + spent_s
    )


def started(*, batch: int = 1, free: bool = True) -> MeasuredPolicy:
    """Return a policy that knows the classic step of a batch."""
    policy = MeasuredPolicy(paid=not free)
    rounds = [outcome(0, 0, STEP_S, request=number) for number in range(batch)]
    for _ in range(5):
        policy.observe_step(step_outcome(rounds, STEP_S))
    return policy


def passed(
    policy: MeasuredPolicy, count: int, *, draft_s: float = 0.0, settle: bool = False
) -> int:
    """Return how many of so many steps in a row the policy lets pass by."""
    done = 0
    for _ in range(count):
        if settle:
            policy.settle()
        if not passes(policy, peek_s=draft_s):
            return done
        done += 1
    return done


@pytest.mark.parametrize("settle", [False, True])
def test_only_so_many_pass_by_however_often_they_are_accounted_for(settle: bool) -> None:
    assert passed(started(), 1000, settle=settle) == MAX_QUIET


@pytest.mark.parametrize("settle", [False, True])
def test_drafting_beside_them_stays_within_half_of_the_budget(settle: bool) -> None:
    """A drafter that says it is free and is not: four steps may be lost, not thirty."""
    policy = started()
    assert passed(policy, 1000, draft_s=0.5 * STEP_S, settle=settle) in (7, 8)
    policy.settle()
    assert policy.ledger.debt_s <= 4 * STEP_S


def test_nothing_passes_by_before_the_classic_step_is_known() -> None:
    policy = MeasuredPolicy(paid=False)
    assert passed(policy, 5) == 0
    policy.observe_step(step_outcome([outcome(0, 0, STEP_S)], STEP_S))
    assert passed(policy, 5) == 0


@pytest.mark.parametrize(("requests", "kv"), [([1], 100), ([0, 1], 100), ([], 0), ([0], 600)])
def test_other_requests_and_a_new_octave_are_looked_at(requests: list[int], kv: int) -> None:
    policy = started()
    assert not passes(policy, requests, kv)
    assert passes(policy)


def test_the_leak_is_that_of_single_steps_and_no_more_than_the_time_taken() -> None:
    policy = started()
    policy.ledger.debt_s = 0.02
    assert passed(policy, 10) == 10
    assert policy.ledger.debt_s == 0.02
    rounds = policy.rounds
    policy.settle()
    assert policy.rounds == rounds + 10
    assert policy.ledger.debt_s == pytest.approx(0.02 - 0.007 * 10 * STEP_S, rel=0.01)
    policy.settle()
    assert policy.rounds == rounds + 10


def test_neighbours_budgets_leak_too() -> None:
    policy = started(batch=2)
    for state in policy.requests.values():
        state.neighbour.debt_s = 0.02
    for _ in range(10):
        assert passes(policy, [0, 1], 200)
    policy.settle()
    for state in policy.requests.values():
        assert state.neighbour.debt_s == pytest.approx(0.02 - 0.05 * 10 * STEP_S, rel=0.02)


def test_what_a_full_look_took_is_no_reason_for_the_next() -> None:
    """Else one look begets another while much is owed, and each costs more than the leak."""
    policy = MeasuredPolicy(paid=False)
    look = StepOutcome(
        rounds=[outcome(0, 0, STEP_S)],
        draft_s=0.0,
        observe_s=0.05 * STEP_S,
        verify_s=STEP_S,
        round_s=1.05 * STEP_S,
    )
    for _ in range(4):
        policy.observe_step(look)
    policy.ledger.debt_s = 8.0 * STEP_S
    owed = policy.ledger.debt_s
    assert passes(policy, thinking_s=0.05 * STEP_S)
    assert all(passes(policy) for _ in range(20))
    policy.settle()
    assert policy.ledger.debt_s == pytest.approx(owed + (0.05 - 21 * 0.007) * STEP_S, rel=1e-3)
