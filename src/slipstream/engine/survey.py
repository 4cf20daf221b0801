"""Measures what forwards cost by row count and context, beside the physical bound of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import (
    calibrate,
    idle_forwards,
    room,
    row_counts,
    teach_drafts,
    time_drafts,
    time_reading,
    time_rows,
)
from slipstream.engine.engine import Engine
from slipstream.kernels.bandwidth import bandwidth_of
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.cost import octave_of

# Contexts that are timed, as far as the model goes; wide batches are timed at the first one only.
CONTEXTS = (0, 1024, 4096)
# Passes over the row counts, and the seconds after which a context is left all the same.
PASSES = 9
BUDGET_S = 12.0
BANDWIDTH_REPEATS = 3

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was timed.

    Attributes:
        times_s: seconds by context and row count.
        bandwidth: bytes per second that the machine's cores read together.
        weight_bytes: bytes of weights that every forward reads.
        kv_token_bytes: bytes of KV that a row reads for each token of context.
    """

    times_s: dict[int, dict[int, float]]
    bandwidth: float
    weight_bytes: int
    kv_token_bytes: int

    def bound_s(self, context_len: int) -> float:
        """Return the least that a forward can take: everything that it must read, once."""
        num_bytes = self.weight_bytes + context_len * self.kv_token_bytes
        return num_bytes / self.bandwidth


def survey(
    engine: Engine,
    policy: MeasuredPolicy,
    progress: Progress,
    contexts: Sequence[int] = CONTEXTS,
) -> Survey:
    """Time an idle engine's forwards and teach its policy what they take.

    Args:
        progress: told what is being done and how much of it is.
    """
    target, config = engine.target, engine.config
    engine.pairing.doubted_costs = None  # what is measured now was asked for
    progress("bandwidth", 0.0)
    bandwidth, _ = bandwidth_of(target.backend, BANDWIDTH_REPEATS)
    progress("bandwidth", 1.0)
    budget = RowBudget.of(config, target.arch.vocab_size)
    times_s: dict[int, dict[int, float]] = {}
    for context_len in contexts:
        num_seqs = config.max_num_seqs if context_len == 0 else 1
        counts = row_counts(policy, num_seqs, room(target, budget, context_len))
        if not counts:
            continue
        stage = f"context {context_len}"
        progress(stage, 0.0)
        with idle_forwards(target, budget, max(counts), context_len) as forwards:
            forwards.fill(budget.prefill)
            tick = partial(_tick, progress, stage, len(counts) * (PASSES + 1))
            timed = time_rows(
                forwards,
                counts,
                budget_s=BUDGET_S,
                passes=PASSES,
                tick=tick,
            )
            if target.head is not None and context_len == contexts[0]:
                drafts_s = time_drafts(forwards, target.head, policy.max_k)
                reading_s = time_reading(target.head, drafts_s.get(1, 0.0))
                teach_drafts(policy.cost.drafting, drafts_s, reading_s)
        progress(stage, 1.0)
        policy.cost.verify.drop({octave_of(context_len)})  # other contexts stay as they are known
        calibrate(policy, timed, context_len)
        times_s[context_len] = timed
    return Survey(
        times_s=times_s,
        bandwidth=bandwidth,
        weight_bytes=target.weight_bytes,
        kv_token_bytes=target.kv_token_bytes,
    )


def _tick(progress: Progress, stage: str, runs: int, done: int) -> None:
    progress(stage, done / runs)
