"""The loss budget: the bound holds over every window, whatever an adversary does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.policy.ledger import (
    BANKED_STEPS,
    CAPACITY_STEPS,
    MOST_FORGIVEN,
    RHO,
    SAVED_STEPS,
    Ledger,
    held_up_s,
)
from slipstream.policy.level import CLAMP
from tests.policy.worlds import benchmark

cases = benchmark("ledger_cases")

# One move of the adversary, made after it saw k: drift of the classic step, the round's cost in
# classic steps, its worst case as promised, the tokens it emits.
MOVES = st.lists(
    st.tuples(st.floats(0.9, 1.1), st.floats(0.1, 30.0), st.floats(0.5, 10.0), st.integers(1, 16)),
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(moves=MOVES)
def test_bound_holds_over_every_window(moves: list[tuple[float, float, float, int]]) -> None:
    """The rule alone, without estimates: every window is looked at one by one."""
    ledger, classic_s = Ledger(), 1.0
    played: list[tuple[float, float, float, float]] = []
    for drift, cost, worst, emitted in moves:
        classic_s *= drift
        worst_s = worst * classic_s
        starts = ledger.may_start(worst_s=worst_s, anchors_s=classic_s, classic_s=classic_s)
        if starts:
            round_s = cost * classic_s
            ledger.charge(round_s=round_s, value_s=emitted * classic_s, classic_s=classic_s)
            played.append((round_s, emitted * classic_s, classic_s, max(0.0, round_s - worst_s)))
        else:
            ledger.leak(value_s=classic_s)
            played.append((classic_s, classic_s, classic_s, 0.0))
    for first in range(len(played)):
        taken = plain = 0.0
        for last in range(first, len(played)):
            taken += played[last][0]
            plain += played[last][1]
            window = played[: last + 1]  # debt may come from before the window, not its capacity
            largest = max(step[2] for step in window)
            allowance = CAPACITY_STEPS * largest + max(step[3] for step in window)
            if first:  # savings may come from before the window as well
                allowance += SAVED_STEPS * largest
            assert taken <= (1.0 + RHO) * plain + allowance + 1e-9


@pytest.mark.parametrize("style", cases.STYLES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_keeps_the_bound_against_adversaries(style: str, seed: int) -> None:
    margin, _ = cases.slack(cases.play(style, random.Random(seed), 100))
    assert margin >= -1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), style=st.sampled_from(cases.STYLES))
def test_policy_keeps_the_bound_in_generated_cases(seed: int, style: str) -> None:
    margin, _ = cases.slack(cases.play(style, random.Random(seed), 60))
    assert margin >= -1e-9


def charge(ledger: Ledger, round_s: float, value_s: float = 1.0, held_s: float = 0.0) -> None:
    """Account for a round that drafted where a classic step takes a second."""
    ledger.charge(round_s=round_s, value_s=value_s, classic_s=1.0, held_s=held_s)


def test_gains_are_saved_up_to_a_few_steps() -> None:
    ledger = Ledger()
    for _ in range(1000):
        charge(ledger, 1.0, 4.0)
    assert (ledger.debt_s, ledger.saved_s) == (0.0, SAVED_STEPS)
    charge(ledger, SAVED_STEPS + 5.0)
    assert ledger.saved_s == 0.0
    assert ledger.debt_s == pytest.approx(4.0 - RHO)


def test_after_a_hiccup_drafting_that_gains_goes_on_and_pays_for_it() -> None:
    """Twelve steps lost at once are more than the capacity: nothing would draft for long."""
    fresh, proven = Ledger(), Ledger()
    for _ in range(20):
        charge(proven, 2.0, 4.0)
    for ledger in (fresh, proven):
        charge(ledger, 13.0)
    start = {"worst_s": 3.0, "anchors_s": 1.0, "classic_s": 1.0}
    assert not fresh.may_start(**start)
    assert proven.may_start(**start)
    assert proven.debt_s == 0.0


def test_what_leaks_away_is_never_saved() -> None:
    """Neither classic steps nor rounds that just break even put anything by."""
    ledger = Ledger()
    for _ in range(1000):
        ledger.leak(value_s=1.0)
        charge(ledger, 4.0, 4.0)
    assert ledger.saved_s == 0.0
    charge(ledger, 1.0, 2.0)
    assert ledger.saved_s == pytest.approx(1.0)


def test_gains_pay_what_is_owed_before_anything_is_saved() -> None:
    ledger = Ledger(debt_s=5.0)
    charge(ledger, 1.0, 4.0)
    assert ledger.saved_s == 0.0
    assert ledger.debt_s == pytest.approx(2.0 - 4.0 * RHO)
    charge(ledger, 1.0, 4.0)
    assert ledger.debt_s == 0.0
    assert 0.0 < ledger.saved_s <= 1.0 + 8.0 * RHO


def test_debt_leaks_with_every_round() -> None:
    ledger = Ledger(debt_s=1.0)
    for _ in range(100):
        ledger.leak(value_s=1.0)
    assert ledger.debt_s == pytest.approx(1.0 - 100 * RHO)


def test_a_round_starts_only_if_its_worst_case_fits() -> None:
    ledger = Ledger(debt_s=6.0)
    assert ledger.may_start(worst_s=3.0, anchors_s=1.0, classic_s=1.0)
    assert not ledger.may_start(worst_s=3.1, anchors_s=1.0, classic_s=1.0)


def classic(ledger: Ledger, round_s: float) -> None:
    """Account for what a classic step worth a second shows of the machine."""
    ledger.forgive(round_s=round_s, held_s=held_up_s(round_s, 1.0), value_s=1.0)


def test_hiccups_of_the_machine_are_forgiven_as_classic_steps_show_them() -> None:
    """A round was held up for 12 steps; then so is a classic step, as likely in as much time."""
    ledger = Ledger()
    charge(ledger, 13.0)
    owed = ledger.debt_s
    for _ in range(10):
        ledger.leak(value_s=1.0)
        classic(ledger, 1.0)
    assert ledger.forgiven_s == 0.0
    assert ledger.debt_s == pytest.approx(owed - 10 * RHO)
    ledger.leak(value_s=1.0)
    classic(ledger, 13.0)
    assert 10.0 < ledger.forgiven_s <= 13.0
    assert 0.0 <= ledger.debt_s < 3.0


def test_nothing_is_forgiven_for_slow_rounds_while_classic_steps_run_smoothly() -> None:
    ledger = Ledger()
    for _ in range(5):
        charge(ledger, 20.0)
        for _ in range(50):
            ledger.leak(value_s=1.0)
            classic(ledger, 1.2)
    assert ledger.forgiven_s == 0.0
    assert ledger.debt_s == pytest.approx(5 * (19.0 - RHO) - 250 * RHO)


def test_one_classic_hiccup_forgives_a_few_times_itself_at_most() -> None:
    ledger = Ledger(debt_s=1e6)
    ledger.drafting_s = 1e5
    classic(ledger, 11.0)
    assert ledger.forgiven_s == pytest.approx(MOST_FORGIVEN * (11.0 - CLAMP))


def test_what_the_estimator_leaves_out_of_a_classic_step_is_what_is_forgiven() -> None:
    """Steps of twice their worth count 1.25 times: v misses the rest, drafting is charged it."""
    ledger = Ledger(debt_s=50.0)
    for _ in range(20):
        classic(ledger, 2.0)
    assert ledger.forgiven_s == pytest.approx(20 * (2.0 - CLAMP), rel=0.1)
    assert held_up_s(CLAMP, 1.0) == 0.0


def test_what_the_machine_lost_while_nothing_was_owed_pays_for_a_later_hiccup() -> None:
    ledger = Ledger()
    ledger.forgive(round_s=10.0, held_s=5.0, value_s=1.0)
    assert (ledger.debt_s, ledger.forgiven_s) == (0.0, 0.0)
    charge(ledger, 6.0, held_s=4.0)
    assert ledger.debt_s == pytest.approx(5.0 - RHO - 4.0)
    assert ledger.forgiven_s == 4.0


def test_what_drafting_loses_by_itself_is_never_paid_from_there() -> None:
    ledger = Ledger()
    ledger.forgive(round_s=10.0, held_s=5.0, value_s=1.0)
    charge(ledger, 3.0)
    assert ledger.debt_s == pytest.approx(2.0 - RHO)
    assert ledger.forgiven_s == 0.0


def test_no_more_is_kept_than_a_few_hiccups() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.forgive(round_s=10.0, held_s=9.0, value_s=1.0)
    charge(ledger, 101.0, held_s=100.0)
    assert ledger.forgiven_s == BANKED_STEPS
