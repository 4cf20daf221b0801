"""Times forwards outside serving, so that the policy's first guess is a measurement.

Every row count is run once before any is timed, and passes go round and round: a machine whose
clock moves then moves all of them alike. The rows are one sequence's, on pages that nobody has
taken yet and that are zeroed again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np

from slipstream.drafters.base import Ask, BatchDrafter, Chosen, Head
from slipstream.drafters.draft_model import ORDINARY_ROWS
from slipstream.engine.budget import RowBudget
from slipstream.engine.pages import pages_for
from slipstream.engine.target import Target
from slipstream.kernels.ops import PAGE_SIZE, Int32, Rows
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.draft_cost import LEAST_READ, DraftCost

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
        max_rows: the widest forward; it fits the target's pages and context.
        max_logits: rows that may want logits.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_rows: int,
        max_logits: int,
        context_len: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.target = target
        self._max_logits = max_logits
        self.context_len = context_len
        self.max_rows = max_rows
        self.switches_after: int = getattr(target.step, "switches_after", 0)
        self.pages = np.arange(pages_for(context_len + max_rows), dtype=np.int32)
        self._clock = clock

    def fill(self, chunk: int) -> None:
        """Write KV for the context, as reading a prompt would, so that it is there to be read."""
        for start in range(0, self.context_len, chunk):
            positions = np.arange(start, min(start + chunk, self.context_len), dtype=np.int32)
            self._run(positions, np.zeros(0, np.int32))

    def __call__(self, num_rows: int) -> float:
        """Run a forward whose rows want logits, as many as may, and return its seconds."""
        rows = np.arange(num_rows, dtype=np.int32)
        began = self._clock()
        self._run(self.context_len + rows, rows[: self._max_logits])
        return self._clock() - began

    def ask(self, k: int, drafter: BatchDrafter) -> Ask:
        """Run a forward of the widest round that k makes, and ask what its first row leads to."""
        self(min(k + 1, self.max_rows))
        last = self.context_len
        return Ask(
            drafter=drafter,
            token_ids=range(last + 2),
            k=k,
            pages=self.pages,
            chosen=Chosen(run=self.target.step.runs, row=0, position=last + 1),
            temperature=0.0,
            seed=0,
            choice=0,
        )

    def _run(self, positions: Int32, logit_rows: Int32) -> None:
        self.target.step(
            Rows(
                token_ids=positions % self.target.arch.vocab_size,
                positions=positions,
                sequences=np.zeros_like(positions),
                page_table=self.pages[None],
                logit_rows=logit_rows,
            )
        )


@contextmanager
def idle_forwards(
    target: Target,
    budget: RowBudget,
    max_rows: int,
    context_len: int = 0,
    clock: Clock = time.perf_counter,
) -> Iterator[Forwards]:
    """Lend a target's first pages for timing, before any sequence has them; zeroed at the end.

    Args:
        max_rows: the widest forward, within `room`.
    """
    forwards = Forwards(
        target,
        max_rows=max_rows,
        max_logits=budget.logits,
        context_len=context_len,
        clock=clock,
    )
    try:
        yield forwards
    finally:
        target.kv.zero(forwards.pages.tolist())


def room(target: Target, budget: RowBudget, context_len: int = 0) -> int:
    """Return the rows of the widest forward of one sequence at a context; below 1 for none.

    Pages, context and the compiled step all limit it.
    """
    positions = min(target.max_model_len, target.kv.num_pages * PAGE_SIZE) - context_len
    return min(budget.rows, positions)


def row_counts(policy: MeasuredPolicy, max_num_seqs: int, max_rows: int) -> list[int]:
    """Return the row counts to time: every one of a single sequence, then what batches need.

    Args:
        max_rows: none is wider, so there may be none at all.
    """
    alone = {policy.cost.padded(k + 1) for k in range(1, policy.max_k + 1)} | {1}
    widest = min(max_rows, policy.cost.padded(max_num_seqs * (policy.max_k + 1)))
    edges = {policy.cost.padded(edge) for edge in policy.cost.verify.edges if edge > max(alone)}
    counts = sorted(alone) + sorted(edges)
    return [rows for rows in counts if rows <= (max_rows if rows in alone else widest)]


def time_rows(
    forwards: Forwards,
    counts: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    passes: int = PASSES,
    tick: Callable[[int], None] = lambda done: None,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Return the median seconds of each row count, narrowest first as far as the budget goes.

    A row count's first run counts only where there was no time for a second one. A wider forward
    does at least as much, so none is held to take longer than a wider one did; but where another
    kernel serves from some row count on, what that one takes says nothing of the narrower ones.

    Args:
        tick: told how many forwards were run.
    """
    started, done = clock(), 0
    samples: dict[int, list[float]] = {}
    for _ in range(passes + 1):
        for num_rows in counts:
            if clock() - started > budget_s:
                break
            samples.setdefault(num_rows, []).append(forwards(num_rows))
            done += 1
            tick(done)
    times_s: dict[int, float] = {}
    least, edge = math.inf, forwards.switches_after
    for num_rows in sorted(samples, reverse=True):
        if num_rows <= edge:
            least, edge = math.inf, 0
        least = min(least, median(samples[num_rows][1:] or samples[num_rows]))
        times_s[num_rows] = least
    return dict(sorted(times_s.items()))


def time_drafts(
    forwards: Forwards,
    head: Head,
    max_k: int,
    *,
    passes: int = PASSES,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Return the median seconds of drafting 1 to max_k tokens for one sequence.

    Each follows a forward, as it does in serving: the head's weights have left the caches by then.
    """
    samples: dict[int, list[float]] = {}
    drafter = head.drafter(shares=False)
    try:
        for _ in range(passes + 1):
            for k in range(1, min(max_k, head.max_k) + 1):
                ask = forwards.ask(k, drafter)
                began = clock()
                if head.propose([ask])[0]:
                    samples.setdefault(k, []).append(clock() - began)
    finally:
        drafter.release()
    return {k: median(times[1:]) for k, times in samples.items()}


def time_reading(
    head: Head, draft_s: float, *, passes: int = PASSES, clock: Clock = time.perf_counter
) -> float | None:
    """Return the median seconds of one token of a chunk that a head reads to catch up.

    None for a head that reads nothing, or has no room for a chunk that says anything.

    Args:
        draft_s: what drafting one token takes.
    """
    samples = []
    num_read = head.chunk
    while num_read and not head.drafter(shares=False).room(num_read + ORDINARY_ROWS):
        num_read //= 2
    for _ in range(passes + 1 if num_read >= LEAST_READ else 0):
        drafter = head.drafter(shares=False)
        began = clock()
        (drafted,) = head.propose([_first_ask(drafter, num_read + ORDINARY_ROWS)])
        samples.append(max(clock() - began - draft_s, 0.0) / num_read)
        drafter.release()
        if not drafted:
            return None
    return median(samples[1:]) if samples else None


def teach_drafts(
    drafting: DraftCost, drafts_s: Mapping[int, float], reading_s: float | None
) -> None:
    """Tell a policy's costs what drafts take, by k, and one token that is read to catch up."""
    for k, seconds in drafts_s.items():
        drafting.calibrate(k, seconds)
    if reading_s is not None:
        drafting.calibrate_reading(reading_s)


def _first_ask(drafter: BatchDrafter, num_tokens: int) -> Ask:
    """Ask for one token behind a text that the drafter knows nothing of."""
    return Ask(
        drafter=drafter,
        token_ids=[0] * num_tokens,
        k=1,
        pages=np.zeros(0, np.int32),
        chosen=None,
        temperature=0.0,
        seed=0,
        choice=0,
    )


def calibrate(policy: MeasuredPolicy, times_s: Mapping[int, float], kv_tokens: int) -> None:
    """Tell a policy what was timed."""
    for num_rows, seconds in times_s.items():
        policy.cost.calibrate(num_rows, kv_tokens, seconds)


def best_of(forwards: Forwards, num_rows: int) -> float | None:
    """Return the seconds of the best of a few runs, as a profile's check wants them.

    None where there is no room for so many rows.
    """
    if num_rows > forwards.max_rows:
        return None
    forwards(num_rows)
    return min(forwards(num_rows) for _ in range(CHECK_RUNS))
