"""S(k), the choice among widths, and the recorded numbers."""

from __future__ import annotations

import pytest

from slipstream.policy.estimate import compare, fallback_multiple, pick, speedup


@pytest.mark.parametrize(
    ("accepted", "round_ms", "expected"),
    [(0.56, 140, 0.769), (1.05, 270, 0.524), (1.07, 98, 1.457)],
)
def test_recorded_arms_have_the_pinned_speedup(
    accepted: float, round_ms: float, expected: float
) -> None:
    assert speedup(1.0 + accepted, 0.069, round_ms / 1e3) == pytest.approx(expected, abs=5e-4)


def test_a_batch_counts_its_tokens_at_its_own_classic_step() -> None:
    assert speedup(8.0, 0.1, 0.2, batch=4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("speedups", "k"),
    [
        ([], 0),
        ([(1, 0.9), (3, 1.019)], 0),
        ([(1, 1.021)], 1),
        ([(1, 1.1), (2, 1.1)], 1),
        ([(1, 1.10), (2, 1.103), (3, 1.107)], 3),
        ([(1, 1.2), (2, 1.1), (7, 1.3)], 7),
    ],
)
def test_pick_keeps_margins_and_takes_the_smaller_of_equals(
    speedups: list[tuple[int, float]], k: int
) -> None:
    assert pick(speedups) == k


def test_once_drafting_the_bar_is_one() -> None:
    assert pick([(1, 1.01)], leave_margin=0.0) == 1


def test_fallback_multiple() -> None:
    assert fallback_multiple(3, bandwidth_bound=False) == 2.0
    assert fallback_multiple(3, bandwidth_bound=True) == 1.0


def test_reason_has_both_sides() -> None:
    assert compare(0.1402, 1.56, 0.069) == (
        "a round of 140.2 ms yields 1.56 tokens; classic makes them in 107.6 ms"
    )
