"""Intervals: exact where nothing varies, wide enough where something does."""

from __future__ import annotations

import math
import random

import pytest

from slipstream.bench.interval import Passes, interval, student_quantile, throughput_ratio


def pair(fast: float, slow: float = 1.0) -> tuple[Passes, Passes]:
    return Passes(tokens=[10], seconds=[fast]), Passes(tokens=[10], seconds=[slow])


def test_ratio_is_of_totals_not_a_mean_of_ratios() -> None:
    assert throughput_ratio([pair(1.0, 2.0), pair(3.0, 3.0)]) == pytest.approx(5 / 4)


def test_nothing_has_no_ratio_and_no_interval() -> None:
    assert throughput_ratio([]) is None
    assert interval([]) is None
    assert interval([[]]) is None


def test_one_prompt_has_no_interval() -> None:
    assert interval([[pair(0.5)]]) is None
    assert interval([[pair(0.5), pair(0.4)], [pair(0.5)]]) is None


def test_equal_prompts_have_an_interval_of_no_width() -> None:
    assert interval([[pair(0.5)] * 5]) == pytest.approx((2.0, 2.0))


def test_the_interval_is_repeatable_and_holds_the_point() -> None:
    pairs = [pair(0.5), pair(0.7), pair(0.4), pair(0.9)]
    low, high = interval([pairs]) or (0.0, 0.0)
    point = throughput_ratio(pairs)
    assert point is not None
    assert low < point < high
    assert interval([pairs]) == (low, high)


@pytest.mark.parametrize("prompts", [4, 8, 20])
def test_the_interval_holds_the_truth_in_nineteen_runs_of_twenty(prompts: int) -> None:
    """Plain percentiles hold it in 84 % of the runs at four prompts."""
    rng, held, runs = random.Random(prompts), 0, 300
    for _ in range(runs):
        pairs = [pair(math.exp(rng.gauss(-0.5, 0.3))) for _ in range(prompts)]
        low, high = interval([pairs]) or (0.0, 0.0)
        held += low <= math.exp(0.5 - 0.3**2 / 2) <= high
    assert held / runs > 0.92


def test_what_differs_between_categories_does_not_widen_the_overall_interval() -> None:
    strata = [[pair(0.5)] * 4, [pair(2.0)] * 4]
    low, high = interval(strata) or (0.0, 0.0)
    assert high == pytest.approx(low)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)]
)
def test_student_quantiles_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(t, rel=0.002)
