"""Timing forwards outside serving: what is timed, in which order, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import (
    Forwards,
    best_of,
    calibrate,
    idle_forwards,
    room,
    row_counts,
    time_rows,
)
from slipstream.engine.pairing import Pairing
from slipstream.policy.choose import MeasuredPolicy
from tests.fake_model import FakeKV, fake_engine, forwards

BUDGET = RowBudget(num_seqs=8, rows=64, logits=32, prefill=16)


class Ticking:
    """Forwards that take what is scripted, on a clock of their own."""

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.now = 0.0
        self.cost = cost
        self.ran: list[int] = []
        self.max_rows = 64
        self.switches_after = 0

    def __call__(self, num_rows: int) -> float:
        taken = self.cost(num_rows, len(self.ran))
        self.ran.append(num_rows)
        self.now += taken
        return taken

    def clock(self) -> float:
        return self.now


def timed(cost: Callable[[int, int], float], counts: list[int]) -> dict[int, float]:
    machine = Ticking(cost)
    return time_rows(machine, counts, budget_s=60, clock=machine.clock)  # type: ignore[arg-type]


def test_the_first_run_of_a_row_count_does_not_count() -> None:
    times_s = timed(lambda rows, run: 5.0 if run < 3 else 0.001 * rows, [1, 2, 3])
    assert times_s == pytest.approx({1: 0.001, 2: 0.002, 3: 0.003})


def test_passes_go_round_and_one_hiccup_does_not_count() -> None:
    machine = Ticking(lambda rows, run: 0.9 if run == 4 else 0.001 * rows)
    times_s = time_rows(machine, [1, 2], budget_s=60, clock=machine.clock)  # type: ignore[arg-type]
    assert machine.ran == [1, 2] * 4
    assert times_s == pytest.approx({1: 0.001, 2: 0.002})


def test_the_budget_is_kept_to_and_narrow_forwards_come_first() -> None:
    machine = Ticking(lambda rows, run: 0.1)
    times_s = time_rows(machine, list(range(1, 17)), budget_s=0.55, clock=machine.clock)  # type: ignore[arg-type]
    assert machine.ran == [1, 2, 3, 4, 5, 6]
    assert set(times_s) == {1, 2, 3, 4, 5, 6}


def test_a_narrow_forward_is_not_held_to_take_longer_than_a_wide_one() -> None:
    costs = {1: 0.9, 2: 0.002, 3: 0.005, 4: 0.004}
    times_s = timed(lambda rows, run: costs[rows], [1, 2, 3, 4])
    assert times_s == pytest.approx({1: 0.002, 2: 0.002, 3: 0.004, 4: 0.004})


def test_a_wider_forward_of_another_kernel_says_nothing_of_a_narrow_one() -> None:
    machine = Ticking(lambda rows, run: {2: 0.004, 4: 0.008, 8: 0.007, 16: 0.003}[rows])
    machine.switches_after = 8
    times_s = time_rows(machine, [2, 4, 8, 16], budget_s=60, clock=machine.clock)  # type: ignore[arg-type]
    assert times_s == pytest.approx({2: 0.004, 4: 0.007, 8: 0.007, 16: 0.003})


def test_progress_is_told_of_every_forward() -> None:
    machine, told = Ticking(lambda rows, run: 0.001), []
    time_rows(machine, [1, 2], passes=2, tick=told.append, clock=machine.clock)  # type: ignore[arg-type]
    assert told == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("pad", "kernel", "tile"), [("auto", "auto", 16), ("8", "auto", 16)])
def test_every_width_of_one_sequence_is_timed_as_it_will_run(
    pad: str, kernel: str, tile: int
) -> None:
    config = EngineConfig(verify_pad=pad, verify_kernel=kernel, tile_m=tile)
    policy = Pairing.fresh(config, [NGramDrafter]).policy
    assert policy is not None
    counts = row_counts(policy, 1, 1000)
    assert counts == ([1, 8, 16] if pad == "8" else list(range(1, 17)))
    wide = row_counts(policy, 8, 100)
    assert wide[: len(counts)] == counts
    assert max(wide) <= 100
    assert max(wide) >= 64


def test_a_context_is_filled_and_pages_are_zero_afterwards() -> None:
    engine = fake_engine()
    kv = engine.target.kv
    assert isinstance(kv, FakeKV)
    kv.tokens[:] = 0
    with idle_forwards(engine.target, BUDGET, 4, 40) as lent:
        lent.fill(16)
        assert kv.tokens.reshape(-1)[1:40].all()
        lent(4)
        assert isinstance(lent, Forwards)
    assert [len(rows.token_ids) for rows in forwards(engine)] == [16, 16, 8, 4]
    last = forwards(engine)[-1]
    assert last.positions.tolist() == [40, 41, 42, 43]
    assert last.logit_rows.tolist() == [0, 1, 2, 3]
    assert not kv.tokens.any()


def test_pages_are_zero_even_if_a_forward_fails() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    engine = fake_engine(after_forward=fail)
    kv = engine.target.kv
    assert isinstance(kv, FakeKV)
    kv.tokens[:] = 0
    with pytest.raises(RuntimeError), idle_forwards(engine.target, BUDGET, 4) as lent:
        lent(3)
    assert not kv.tokens.any()


def test_what_was_timed_is_what_the_policy_starts_from() -> None:
    policy = MeasuredPolicy()
    calibrate(policy, {1: 0.010, 5: 0.013}, 0)
    assert policy.cost.verify.time_s(5, 100) == pytest.approx(0.013)
    assert policy.cost.verify.time_s(4, 100) is None
    assert policy.cost.classic.time_s(1, 0) is None  # that is measured in serving alone


def test_the_best_of_a_few_runs_checks_a_profile() -> None:
    machine = Ticking(lambda rows, run: [0.9, 0.3, 0.1, 0.2][run])
    assert best_of(machine, 1) == 0.1  # type: ignore[arg-type]
    assert best_of(machine, 99) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "widest"),
    [
        ({"kv_tokens": 16}, 16),
        ({"kv_tokens": 112}, 112),
        ({"max_batch_rows": 8}, 8),
        ({"max_batch_rows": 1, "max_num_seqs": 1, "prefill_chunk": 1}, 1),
        ({"max_model_len": 2}, 2),
        ({"verify_pad": "256"}, 256),
        ({"verify_pad": "256", "prefill_chunk": 512}, 256),
    ],
)
def test_no_forward_is_wider_than_pages_context_and_step(
    settings: dict[str, Any], widest: int
) -> None:
    """A crash at load: rows beyond the last page, or beyond what the step was compiled for."""
    settings = dict(settings)
    engine = fake_engine(**{"max_model_len": settings.pop("max_model_len", 256), **settings})
    policy = MeasuredPolicy(pad_to=int(settings.get("verify_pad", 1)))
    budget = RowBudget.of(engine.config, engine.target.arch.vocab_size)
    limit = room(engine.target, budget)
    counts = row_counts(policy, engine.config.max_num_seqs, limit)
    assert counts[0] == 1
    assert max(counts) <= min(limit, widest)
    with idle_forwards(engine.target, budget, max(counts)) as lent:
        time_rows(lent, counts, budget_s=0.5)
    for rows in forwards(engine):
        assert rows.page_table.max() < engine.target.kv.num_pages
        assert rows.positions.max() < engine.target.max_model_len
        assert len(rows.token_ids) <= budget.rows
        assert len(rows.logit_rows) <= budget.logits
