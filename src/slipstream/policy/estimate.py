"""What a width is worth: the speedup S(k), and the choice among widths.

    S(k) = (1 + E[accepted | k]) * t_classic / (t_verify(k + 1) + t_draft(k) + t_overhead)

S(0) = 1. In a batch of B the numerator is the tokens emitted times t_classic(B) / B. Acceptance
alone never decides and neither does cost: only their quotient does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# To leave k = 0 a width must promise this much: classic steps are certain, estimates are not.
LEAVE_MARGIN = 0.02
# A wider round must promise this much more than a narrower one: less is within the noise.
WIDTH_MARGIN = 0.005


def speedup(emitted: float, classic_s: float, round_s: float, *, batch: int = 1) -> float:
    """Return S: how many times faster than classic steps a round makes its tokens.

    Args:
        emitted: expected tokens of all sequences, 1 + E[accepted] for each.
        classic_s: a classic step of the same batch.
        round_s: the whole round, drafting, verify and overhead.
        batch: sequences in it.

    Example: 1.56 tokens in 140 ms where a classic step takes 69 ms is 0.769.
    """
    return emitted * classic_s / (batch * round_s)


def pick(speedups: Sequence[tuple[int, float]], *, leave_margin: float = LEAVE_MARGIN) -> int:
    """Return the k to run; 0 unless some width beats it by the margin.

    Args:
        speedups: (k, S) for k > 0, narrowest first.
        leave_margin: what the first width must promise beyond 1.

    Example: [(1, 1.10), (2, 1.103), (3, 1.107)] gives 3: 1.103 is within half a percent of 1.10,
    1.107 is not.
    """
    chosen, bar = 0, 1.0 + leave_margin
    for k, value in speedups:
        if value > bar:
            chosen, bar = k, value * (1.0 + WIDTH_MARGIN)
    return chosen


def fallback_multiple(k: int, *, bandwidth_bound: bool) -> float:
    """Return a verify's cost in classic steps, guessed where no classic step was measured.

    1 where verify is known to read the weights once, else the square root of its rows. The guess
    was wrong in both directions on recorded hardware, so a measurement always goes before it.
    """
    return 1.0 if bandwidth_bound else math.sqrt(k + 1)


def compare(round_s: float, emitted: float, classic_s: float, *, batch: int = 1) -> str:
    """Return a round and its classic counterpart in words, in milliseconds.

    Example: "a round of 140.2 ms yields 1.56 tokens; classic makes them in 107.6 ms".
    """
    classic_ms = 1e3 * emitted * classic_s / batch
    return (
        f"a round of {1e3 * round_s:.1f} ms yields {emitted:.2f} tokens; "
        f"classic makes them in {classic_ms:.1f} ms"
    )
