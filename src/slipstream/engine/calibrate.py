"""Times forwards outside serving, so that the policy's first guess is a measurement.

Every row count is run once before any is timed, and passes go round and round: a machine whose
clock moves then moves all of them alike. The rows are one sequence's, on pages that nobody has
taken yet and that are zeroed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np

from slipstream.engine.pages import pages_for
from slipstream.engine.target import Target
from slipstream.kernels.ops import Rows
from slipstream.policy.choose import MeasuredPolicy

# Seconds that timing may take at load, and passes over the row counts if it takes less.
BUDGET_S = 0.6
PASSES = 3
# Runs of a row count when a profile is checked.
CHECK_RUNS = 3

Clock = Callable[[], float]


class Forwards:
    """Forwards of one sequence at a context, each timed when it is run.

    Args:
        context_len: positions that the rows attend to besides themselves; their KV is whatever the
            pages hold.
        max_rows: the widest forward.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_rows: int,
        context_len: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.target = target
        self.context_len = context_len
        self.pages = np.arange(pages_for(context_len + max_rows), dtype=np.int32)
        self._clock = clock

    def __call__(self, num_rows: int, *, live: int | None = None) -> float:
        """Run a forward and return its seconds.

        Args:
            live: rows that are tokens of the sequence and want logits, all by default; the others
                are padding.
        """
        live = num_rows if live is None else live
        rows = np.arange(num_rows, dtype=np.int32)
        step = Rows(
            token_ids=rows % self.target.arch.vocab_size,
            positions=np.where(rows < live, self.context_len + rows, -1).astype(np.int32),
            sequences=np.zeros(num_rows, np.int32),
            page_table=self.pages[None],
            logit_rows=rows[:live],
        )
        began = self._clock()
        self.target.step(step)
        return self._clock() - began


@contextmanager
def idle_forwards(target: Target, max_rows: int, context_len: int = 0) -> Iterator[Forwards]:
    """Lend a target's first pages for timing, before any sequence has them; zeroed at the end."""
    forwards = Forwards(target, max_rows=max_rows, context_len=context_len)
    try:
        yield forwards
    finally:
        target.kv.zero(forwards.pages.tolist())


def row_counts(policy: MeasuredPolicy, max_num_seqs: int, max_rows: int) -> list[int]:
    """Return the row counts to time: every one of a single sequence, then what batches need."""
    alone = {policy.cost.padded(k + 1) for k in range(1, policy.max_k + 1)} | {1}
    widest = min(max_rows, policy.cost.padded(max_num_seqs * (policy.max_k + 1)))
    edges = {policy.cost.padded(edge) for edge in policy.cost.verify.edges if edge > max(alone)}
    return sorted(alone) + sorted(edge for edge in edges if edge <= widest)


def time_rows(
    forwards: Forwards,
    counts: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    passes: int = PASSES,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Return the median seconds of each row count, narrowest first as far as the budget goes."""
    started = clock()
    samples: dict[int, list[float]] = {}
    for lap in range(passes + 1):
        for num_rows in counts:
            taken = samples.setdefault(num_rows, [])
            if clock() - started > budget_s:
                break
            seconds = forwards(num_rows)
            if lap:
                taken.append(seconds)
    return {num_rows: median(taken) for num_rows, taken in samples.items() if taken}


def calibrate(policy: MeasuredPolicy, times_s: Iterable[tuple[int, float]], kv_tokens: int) -> int:
    """Tell a policy what was timed; return how many row counts it was."""
    count = 0
    for count, (num_rows, seconds) in enumerate(times_s, 1):
        policy.cost.calibrate(num_rows, kv_tokens, seconds)
    return count


def best_of(forwards: Forwards, num_rows: int) -> float:
    """Return the seconds of the best of a few runs, as a profile's check wants them."""
    forwards(num_rows)
    return min(forwards(num_rows) for _ in range(CHECK_RUNS))
