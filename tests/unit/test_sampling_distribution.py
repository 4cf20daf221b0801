"""Sampled tokens follow the target's distribution exactly, filters and temperature included.

Guards two reported faults: multi-token prediction that took the argmax whatever the temperature
(mlxcel 902), and a temperature that acceptance did not see (vllm 10198). Five tokens, 1e5 draws,
chi-square against the exact distribution, seeds fixed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slipstream.engine.sampling import Sampler, native_kernel, reference_kernel
from slipstream.types import SamplingParams

LOGITS = np.array([1.3, -0.4, 2.1, 0.9, -1.7], np.float32)
NUM_DRAWS = 100_000
LEAST_P_VALUE = 1e-4
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 3},
    {"top_p": 0.9, "top_k": 3, "min_p": 0.1},
]


def exact(temperature: float, top_p: float = 1, top_k: int = 0, min_p: float = 0) -> list[float]:
    """Return the distribution, by the definition and in plain Python."""
    weights = {i: math.exp(float(x) / temperature) for i, x in enumerate(LOGITS)}
    order = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total, held, nucleus = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if held >= top_p * total:
            break
        nucleus.append(i)
        held += weights[i]
    final = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    mass = sum(weights[i] for i in final)
    return [weights[i] / mass if i in final else 0.0 for i in range(len(LOGITS))]


def p_value(chi_square: float, freedom: int) -> float:
    """Return the upper tail of the chi-square distribution, freedom 1 to 4."""
    half = chi_square / 2
    if freedom == 1:
        return math.erfc(math.sqrt(half))
    if freedom == 2:
        return math.exp(-half)
    lower = p_value(chi_square, freedom - 2)
    return lower + half ** (freedom / 2 - 1) * math.exp(-half) / math.gamma(freedom / 2)


def check(counts: np.ndarray, distribution: list[float]) -> None:
    expected = np.array(distribution) * counts.sum()
    live = expected > 0
    assert counts[~live].sum() == 0
    if live.sum() > 1:
        chi_square = float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())
        assert p_value(chi_square, int(live.sum()) - 1) > LEAST_P_VALUE


@pytest.fixture(scope="module")
def kernel() -> Any:
    try:
        return native_kernel("portable")
    except ImportError:
        return None


def counts_of(kernel: Any, params: SamplingParams, num_draws: int) -> np.ndarray:
    counts = np.zeros(len(LOGITS), np.int64)
    for seed in range(10):
        sampler = Sampler(params, vocab_size=len(LOGITS), seed=seed << 33, kernel=kernel)
        history = sampler.history([0])
        for position in range(num_draws // 10):
            counts[sampler.pick(LOGITS, history, position)] += 1
    return counts


def test_the_p_value_is_the_textbook_s() -> None:
    for freedom, chi_square in ((1, 3.841), (2, 5.991), (3, 7.815), (4, 9.488)):
        assert p_value(chi_square, freedom) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.5])
def test_draws_follow_the_exact_distribution(
    kernel: Any, temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, **filters)
    if kernel is None:
        counts = counts_of(reference_kernel(), params, NUM_DRAWS // 20)
    else:
        counts = counts_of(kernel, params, NUM_DRAWS)
    check(counts, exact(temperature, **filters))


def test_accepted_drafts_and_bonus_tokens_together_follow_it_too() -> None:
    """Drafts that are right, wrong or the argmax leave the distribution alone."""
    params = SamplingParams(temperature=0.7, top_p=0.95)
    sampler = Sampler(params, vocab_size=5, seed=11, kernel=reference_kernel())
    counts = np.zeros(5, np.int64)
    history = sampler.history([0])
    for trial in range(3000):
        drafts = [2, 2, trial % 5]
        for token in sampler.pick_run([LOGITS] * 4, history, drafts):
            counts[token] += 1
    check(counts, exact(0.7, top_p=0.95))


def test_greedy_is_the_argmax_whatever_the_filters() -> None:
    for filters in FILTERS:
        params = SamplingParams(temperature=0.0, **filters)
        sampler = Sampler(params, vocab_size=5, seed=3, kernel=reference_kernel())
        picked = {sampler.pick(LOGITS, sampler.history([0]), p) for p in range(50)}
        assert picked == {2}
