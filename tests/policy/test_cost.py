"""Costs: a staircase, robust, along the context, charged to the right round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.policy.base import StepOutcome
from slipstream.policy.cost import Staircase
from slipstream.policy.level import Level
from slipstream.policy.round_cost import RoundCost
from tests.policy.worlds import outcome


def test_nothing_is_interpolated_across_a_bucket_edge() -> None:
    stairs = Staircase((1, 4, 8))
    stairs.observe(1, 100, 1.0)
    stairs.observe(8, 100, 2.0)
    assert stairs.time_s(3, 100) is None
    stairs.observe(4, 100, 1.1)
    assert [stairs.time_s(rows, 100) for rows in (1, 2, 3, 4, 5, 8)] == [1, 1.1, 1.1, 1.1, 2, 2]


def test_an_unmeasured_bucket_is_bounded_by_its_neighbours() -> None:
    stairs = Staircase((1, 2, 4, 8))
    assert stairs.worst_s(4, 100) is None
    stairs.observe(1, 100, 1.0)
    assert 4.0 <= (stairs.worst_s(4, 100) or 0.0) < 5.0
    assert stairs.least_s(4, 100) == 1.0
    stairs.observe(8, 100, 1.5)
    assert 1.5 <= (stairs.worst_s(4, 100) or 0.0) < 2.0


def test_first_probe_that_compiles_is_discarded() -> None:
    """mlxcel: 1.6 s of kernel compilation against 74 ms steady."""
    stairs = Staircase()
    for _ in range(3):
        stairs.observe(1, 100, 0.069)
    stairs.observe(4, 100, 1.6)
    assert stairs.time_s(4, 100) is None
    stairs.observe(4, 100, 0.074)
    assert stairs.time_s(4, 100) == pytest.approx(0.074)


def test_first_sample_of_all_may_compile_too() -> None:
    level = Level(1.6, 0, 0)
    level.add(0.074, 0, 1)
    assert level.seconds == pytest.approx(0.074)


def test_one_outlier_never_decides() -> None:
    level = Level(0.1, 0, 0)
    for now in range(40):
        level.add(0.1, 0, now)
    level.add(2.0, 0, 41)
    assert level.seconds == pytest.approx(0.1)
    level.add(0.2, 0, 42)
    assert level.seconds < 0.102


def test_four_in_a_row_are_a_change() -> None:
    level = Level(0.1, 0, 0)
    for now in range(40):
        level.add(0.1, 0, now)
    for now in range(40, 44):
        level.add(0.5, 0, now)
    assert level.seconds == pytest.approx(0.5)


def test_context_is_followed_and_remembered() -> None:
    stairs = Staircase()
    for kv in (1000, 2000, 4000, 32000):
        for _ in range(40):
            stairs.observe(1, kv, 0.01 + 1e-6 * kv)
    for kv in (1000, 3000, 32000, 16000):
        assert stairs.time_s(1, kv) == pytest.approx(0.01 + 1e-6 * kv, rel=0.02)


def test_draft_is_charged_to_the_round_that_verifies_it() -> None:
    """Rapid-MLX 1441: forward 10 ms, draft 50 ms must read cost(1) = 60 ms."""
    cost = RoundCost()
    part = outcome(1, 0, 0.060, draft_s=0.050)
    cost.observe(StepOutcome(rounds=[part], draft_s=0.050, verify_s=0.010, round_s=0.060), 1)
    assert cost.round_s(2, 100, cost.drafting.drafting_s([1])) == pytest.approx(0.060)


def test_fixed_cost_of_a_round_is_in_the_estimate() -> None:
    """llama.cpp 26100: about 20 ms a round that was in nobody's model."""
    cost = RoundCost()
    for now in range(20):
        step = StepOutcome(
            rounds=[outcome(3, 0, 0.1)], draft_s=0.005, verify_s=0.040, round_s=0.065
        )
        cost.observe(step, now)
    assert cost.round_s(4, 100, cost.drafting.drafting_s([3])) == pytest.approx(0.065, rel=0.01)


def test_fallback_is_never_consulted_once_a_classic_step_is_measured() -> None:
    cost = RoundCost()
    cost.calibrate(4, 100, 0.08)
    assert cost.classic_s(1, 100) == pytest.approx(0.04)  # sqrt(k + 1) = 2
    flat = RoundCost(bandwidth_bound=True)
    flat.calibrate(4, 100, 0.08)
    assert flat.classic_s(1, 100) == pytest.approx(0.08)
    for each in (cost, flat):
        step = StepOutcome(rounds=[outcome(0, 0, 0.05)], draft_s=0, verify_s=0.05, round_s=0.05)
        each.observe(step, 1)
        assert each.classic_s(1, 100) == pytest.approx(0.05)


def test_state_survives_a_round_trip() -> None:
    cost = RoundCost()
    for k in (0, 0, 1, 3):
        step = StepOutcome(
            rounds=[outcome(k, 0, 0.01 + k / 1000, draft_s=k / 2000)],
            draft_s=k / 2000,
            verify_s=0.009,
            round_s=0.01 + k / 1000,
        )
        cost.observe(step, 1)
    other = RoundCost()
    other.restore(cost.state())
    assert other.state() == cost.state()
    assert other.classic_s(1, 100) == cost.classic_s(1, 100)


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 1 << 17), st.floats(1e-6, 10.0)), min_size=1, max_size=12
    ),
    kv_tokens=st.integers(0, 1 << 17),
)
def test_no_noise_makes_a_forward_take_no_time(
    samples: list[tuple[int, float]], kv_tokens: int
) -> None:
    stairs = Staircase()
    for context, seconds in samples:
        stairs.observe(1, context, seconds)
    expected = stairs.time_s(1, kv_tokens)
    assert expected is not None
    assert expected > 0.0


def classic_step(forward_s: float, prefill_rows: int = 0) -> StepOutcome:
    return StepOutcome(
        rounds=[outcome(0, 0, forward_s)],
        draft_s=0.0,
        verify_s=forward_s,
        round_s=1.1 * forward_s,
        prefill_rows=prefill_rows,
    )


def loaded(factor: float) -> RoundCost:
    """Return costs timed at load, on a machine whose times were off by a factor just then."""
    cost = RoundCost()
    for rows in range(1, 9):
        cost.calibrate(rows, 0, factor * (1.0 + 0.1 * rows))
    cost.drafting.calibrate(3, factor * 0.3)
    return cost


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2, 2.0, 2.9, 6.0])
def test_first_classic_steps_correct_what_a_busy_load_timed(factor: float) -> None:
    cost = loaded(factor)
    for now in range(1, 7):
        cost.observe(classic_step(1.1), now)
    is_off = not 0.8 < factor < 1.25
    for rows in range(2, 9):
        believed = 1.0 if is_off else factor
        assert cost.verify.time_s(rows, 0) == pytest.approx(believed * (1.0 + 0.1 * rows), rel=0.01)
    assert cost.drafting.times(1)[3] == pytest.approx(0.3 * (1.0 if is_off else factor), rel=0.01)


def test_what_was_run_in_service_is_not_corrected() -> None:
    cost = loaded(3.0)
    cost.observe(
        StepOutcome(rounds=[outcome(3, 3, 1.4)], draft_s=0.0, verify_s=1.4, round_s=1.5), 1
    )
    own_s = cost.verify.time_s(4, 100)
    for now in range(2, 9):
        cost.observe(classic_step(1.1), now)
    assert cost.verify.time_s(4, 100) == own_s
    assert cost.verify.time_s(8, 0) == pytest.approx(1.8, rel=0.01)


def test_steps_with_a_prompt_and_single_hiccups_correct_nothing() -> None:
    cost = loaded(1.0)
    for now, forward_s in enumerate([1.1, 9.9, 1.1, 9.9, 1.1, 1.1, 1.1], 1):
        cost.observe(classic_step(5.5, prefill_rows=32), now)
        cost.observe(classic_step(forward_s), now)
    assert cost.verify.time_s(8, 0) == pytest.approx(1.8, rel=0.01)
