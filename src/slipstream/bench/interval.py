"""How sure a speedup is: a bootstrap over prompts, and over the passes of each prompt.

Prompts differ more than runs do, so prompts are drawn with replacement, within their categories,
and for each drawn prompt the passes of either arm: the spread of the drawn ratios is what another
run of other prompts would show. A dozen prompts make a plain percentile interval too narrow
(Hesterberg 2015, arXiv 1411.5279, section 4), so the interval is a t interval on the logarithm of
the ratio, its standard error the bootstrap's with the shrinkage of small samples undone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
DRAWS = 4000
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Tokens and seconds of one prompt under one arm, a value a pass."""

    tokens: Sequence[float]
    seconds: Sequence[float]


Pair = tuple[Passes, Passes]  # of one prompt: the arm, and what it is compared with


def throughput_ratio(pairs: Sequence[Pair]) -> float | None:
    """Return the throughput of the first over that of the second, None of nothing."""
    rates = []
    for side in range(2):
        tokens = sum(sum(pair[side].tokens) for pair in pairs)
        seconds = sum(sum(pair[side].seconds) for pair in pairs)
        if not tokens or not seconds:
            return None
        rates.append(tokens / seconds)
    return rates[0] / rates[1]


def interval(strata: Sequence[Sequence[Pair]], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % interval of a throughput ratio; None where a stratum has a single prompt.

    Args:
        strata: pairs of each category; prompts are drawn within it.
    """
    strata = [pairs for pairs in strata if pairs]
    if not strata or min(map(len, strata)) < 2:
        return None
    rng = np.random.default_rng(seed)
    sums = np.zeros((4, DRAWS))
    for pairs in strata:
        chosen = rng.integers(len(pairs), size=(DRAWS, len(pairs)))
        for side in range(2):
            drawn = _drawn([pair[side] for pair in pairs], chosen, rng)
            sums[2 * side : 2 * side + 2] += drawn
    if not sums[1].all() or not sums[2].all():
        return None
    logs = np.log(sums[0] / sums[1] * sums[3] / sums[2])
    num_prompts = sum(map(len, strata))
    freedom = num_prompts - len(strata)
    t = student_quantile((1 + LEVEL) / 2, freedom)
    half = t * float(logs.std()) * math.sqrt(num_prompts / freedom)
    point = throughput_ratio([pair for pairs in strata for pair in pairs])
    return None if point is None else (point * math.exp(-half), point * math.exp(half))


def _drawn(arms: Sequence[Passes], chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> F64:
    """Return tokens and seconds of each draw, shape (2, DRAWS); passes are drawn too."""
    width = max(len(arm.seconds) for arm in arms)
    counts = np.array([len(arm.seconds) for arm in arms])
    tokens, seconds = np.zeros((len(arms), width)), np.zeros((len(arms), width))
    for row, arm in enumerate(arms):
        tokens[row, : len(arm.tokens)] = arm.tokens
        seconds[row, : len(arm.seconds)] = arm.seconds
    out = np.zeros((2, len(chosen)))
    for _ in range(width):
        passes = (rng.random(chosen.shape) * counts[chosen]).astype(np.int64)
        out[0] += tokens[chosen, passes].sum(axis=1)
        out[1] += seconds[chosen, passes].sum(axis=1)
    return out


def student_quantile(probability: float, freedom: int) -> float:
    """Return Student's t quantile, e.g. 2.365 at 0.975 with 7 degrees of freedom.

    Exact for one and two degrees, else the expansion of Abramowitz and Stegun 26.7.5, good to a
    percent from three degrees on.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        a = 2 * probability - 1
        return a * math.sqrt(2 / (1 - a * a))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))
