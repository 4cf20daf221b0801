"""The measured policy on a virtual clock: each test is a fault that somebody reported."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from slipstream.policy.base import RoundView, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.simulator import World, run
from tests.policy.worlds import (
    batch_step,
    calibrate,
    flat_world,
    outcome,
    share_drafting,
    step_outcome,
    view,
)


def world_with(costs: dict[int, float], chance: float, ceiling: int) -> World:
    """Return a world whose forwards cost seconds by row count."""
    return World(
        forward_s=lambda rows, context_len, now: costs[rows],
        chances=lambda now: [chance] * ceiling,
        ceiling=ceiling,
    )


def test_choose_is_pure() -> None:
    policy = MeasuredPolicy()
    world = flat_world(0.7, free=False)
    run(world, policy, random.Random(0), num_rounds=100)
    before = policy.snapshot()
    decisions = {policy.choose(view()) for _ in range(20)}
    assert len(decisions) == 1
    assert policy.snapshot() == before
    policy.choose(view(request=99))
    assert 99 not in policy.requests


def test_first_rounds_are_classic_steps() -> None:
    steps = run(flat_world(0.9, free=False), MeasuredPolicy(), random.Random(0), num_rounds=3)
    assert [step.k for step in steps] == [0, 0, 0]
    assert all(step.reason.startswith("unmeasured") for step in steps)


@pytest.mark.parametrize("seed", range(3))
def test_high_acceptance_alone_never_decides(seed: int) -> None:
    """vllm 39680, unsloth 6468: 96.6 % accepted and 2.7 times slower."""
    world = world_with({1: 0.0029, 2: 0.0154}, 0.966, 1)
    policy = MeasuredPolicy()
    calibrate(policy, world)
    steps = run(world, policy, random.Random(seed), num_rounds=2000)
    assert share_drafting(steps) < 0.002
    assert steps[-1].reason.startswith("decline: a round of 15.4 ms")


def test_a_width_that_loses_with_every_draft_accepted_is_not_even_shadowed() -> None:
    """vllm 47277: 37.7 + 35 + 26k ms."""
    world = world_with({1: 0.0377, 2: 0.0987}, 1.0, 1)
    policy = MeasuredPolicy()
    calibrate(policy, world)
    run(world, policy, random.Random(0), num_rounds=50)
    assert policy.choose(view(ceiling=1)).shadow == 0
    assert policy.choose(view(ceiling=1)).k == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("calibrated", [True, False])
def test_catastrophic_width_is_aborted_and_never_tried_again(seed: int, calibrated: bool) -> None:
    """mlx-lm 1211: 7.4 to 0.54 tok/s."""
    world = world_with({1: 1 / 7.4, 2: 1 / 0.54, 3: 1 / 0.54, 4: 1 / 0.54}, 0.5, 3)
    policy = MeasuredPolicy(edges=(1, 4))
    if calibrated:
        calibrate(policy, world)
    steps = run(world, policy, random.Random(seed), num_rounds=6000)
    tried = [index for index, step in enumerate(steps) if step.k > 0]
    assert len(tried) <= (0 if calibrated else 2)
    assert all(index < 4000 for index in tried)


def test_a_compilation_in_serving_does_not_condemn_a_width() -> None:
    """mlxcel: the first probe held 1.6 s of compilation, 74 ms steady."""
    world = world_with({1: 0.069, 2: 0.074}, 0.9, 1)
    compiled: list[int] = []

    def forward_s(rows: int, context_len: int, now: int) -> float:
        if rows == 2 and not compiled:
            compiled.append(now)
            return 1.6
        return world.forward_s(rows, context_len, now)

    steps = run(
        replace(world, forward_s=forward_s), MeasuredPolicy(), random.Random(1), num_rounds=8000
    )
    assert compiled
    assert share_drafting(steps[-500:]) > 0.9


@pytest.mark.parametrize("free", [True, False])
def test_a_load_in_a_busy_moment_does_not_end_drafting(free: bool) -> None:
    """mlx-dspark: what a hot device was timed at held for ever."""
    world = flat_world(0.8, free=free, per_row=0.05)
    busy = replace(world, forward_s=lambda rows, kv, now: 2.9 * world.forward_s(rows, kv, now))
    policy = MeasuredPolicy(paid=not free)
    calibrate(policy, busy)
    steps = run(world, policy, random.Random(2), num_rounds=200)
    assert share_drafting(steps[40:]) > 0.9


def test_prose_then_code_then_prose_switches_both_ways() -> None:
    """oMLX 2995, TensorRT-LLM 12905: once off, off for the rest of the reply."""
    for free in (True, False):
        world = replace(
            flat_world(0.0, free=free, per_row=0.15),
            chances=lambda now: [0.9 if 600 <= now < 1200 else 0.1] * 7,
        )
        prose, code, again = 0.0, 1.0, 0.0
        for seed in range(8):  # trials in prose come in streaks, so only their mean is bounded
            policy = MeasuredPolicy(paid=not free)
            calibrate(policy, world)
            steps = run(world, policy, random.Random(seed), num_rounds=1800)
            prose += share_drafting(steps[300:600]) / 8
            code = min(code, share_drafting(steps[700:1200] if free else steps[800:1200]))
            again += share_drafting(steps[1300:]) / 8
        assert prose < 0.1
        assert code > 0.9
        assert again < 0.12


@pytest.mark.parametrize("seed", range(5))
def test_free_scoring_re_engages_within_twenty_five_rounds(seed: int) -> None:
    world = replace(
        flat_world(0.0, free=True, per_row=0.15),
        chances=lambda now: [0.9 if now >= 500 else 0.1] * 7,
    )
    policy = MeasuredPolicy(paid=False)
    calibrate(policy, world)
    steps = run(world, policy, random.Random(seed), num_rounds=600)
    first = next(index for index in range(500, 600) if steps[index].k > 1)
    assert first < 525


def test_gain_at_short_context_that_is_a_loss_at_long_context() -> None:
    """vllm 47602: 1k to 32k within a request, then a new short one."""

    def forward_s(rows: int, context_len: int, now: int) -> float:
        return 0.01 * (1.0 + 0.05 * (rows - 1) + context_len / 8000 * rows * 0.8)

    world = replace(flat_world(0.6, free=False, ceiling=3), forward_s=forward_s)
    policy = MeasuredPolicy()
    for kv in (1000, 8000, 32000):
        calibrate(policy, world, kv)
    rng = random.Random(3)
    assert world.best(1000)[0] > 0
    assert world.best(32000)[0] == 0
    short = run(world, policy, rng, num_rounds=300, context_len=1000, request=1)
    assert share_drafting(short[50:]) > 0.8
    long = run(world, policy, rng, num_rounds=300, context_len=30000, request=1)
    assert share_drafting(long[50:]) < 0.1
    again = run(world, policy, rng, num_rounds=100, context_len=1000, request=2)
    assert share_drafting(again[10:]) > 0.8


def play_batch(policy: MeasuredPolicy, batch: int, num_steps: int, *, chance: float) -> list[int]:
    """Play steps of a batch whose widths are drafted in full; return rows drafted each step."""
    rng = random.Random(batch)
    drafted = []
    for _ in range(num_steps):
        widths = batch_step(policy, range(batch))
        rows = batch + sum(widths)
        round_s = 0.01 * (1.0 + 0.02 * min(rows, 8) + 0.25 * max(0, rows - 8))
        hits = [sum(rng.random() < chance for _ in range(k)) for k in widths]
        rounds = [
            outcome(k, accepted, round_s, request=index)
            for index, (k, accepted) in enumerate(zip(widths, hits, strict=True))
        ]
        policy.observe_step(step_outcome(rounds, round_s))
        drafted.append(sum(widths))
    return drafted


def batch_policy() -> MeasuredPolicy:
    policy = MeasuredPolicy()
    for rows in range(1, 17):
        for _ in range(3):
            seconds = 0.01 * (1.0 + 0.02 * min(rows, 8) + 0.25 * max(0, rows - 8))
            policy.cost.calibrate(rows, 100, seconds)
    for index in range(8):
        for _ in range(20):
            policy.acceptance.paid.observe(7, 2 + index % 3, 3 + index % 3)
    return policy


def test_width_falls_with_load_to_zero() -> None:
    """vLLM blog: a fixed k sheds 38 % after 64 clients."""
    policy = batch_policy()
    rows = [play_batch(policy, batch, 40, chance=0.7)[-1] for batch in (1, 4, 8, 12)]
    assert rows[0] >= 3
    assert rows[0] >= rows[1] / 4
    assert 0 < rows[1] <= 8
    assert rows[2:] == [0, 0]


def test_batch_of_four_five_four_follows_within_five_steps() -> None:
    policy = batch_policy()
    four = play_batch(policy, 4, 40, chance=0.7)[-1]
    assert four > 0
    play_batch(policy, 8, 20, chance=0.7)
    assert play_batch(policy, 4, 5, chance=0.7)[-1] == pytest.approx(four, abs=1)
    assert any(play_batch(policy, 5, 5, chance=0.7))
    assert any(play_batch(policy, 4, 2, chance=0.7))


def test_rows_go_to_the_sequences_that_use_them() -> None:
    policy = batch_policy()
    for _ in range(30):
        rounds = [
            outcome(3, 3, 0.012, request=0),
            outcome(3, 0, 0.012, request=1),
        ]
        policy.observe_step(step_outcome(rounds, 0.012))
    for _ in range(3):
        rounds = [outcome(0, 0, 0.0104, request=0), outcome(0, 0, 0.0104, request=1)]
        policy.observe_step(step_outcome(rounds, 0.0104))
    widths = batch_step(policy, [0, 1])
    assert widths[0] > widths[1]
    assert widths[0] >= 4


def test_a_neighbour_that_gains_nothing_loses_five_percent_at_most() -> None:
    policy = MeasuredPolicy()
    for rows in range(1, 17):
        for _ in range(3):
            policy.cost.calibrate(rows, 100, 0.01 * (1.0 + 0.1 * (rows - 1)))
    taken = classic = 0.0
    rng = random.Random(0)
    for _ in range(3000):
        widths = batch_step(policy, [0, 1])
        round_s = 0.01 * (1.0 + 0.1 * (1 + sum(widths)))
        accepted = [widths[0], 0] if rng.random() < 0.9 else [0, 0]
        rounds = [
            outcome(k, hits, round_s, request=index)
            for index, (k, hits) in enumerate(zip(widths, accepted, strict=True))
        ]
        policy.observe_step(step_outcome(rounds, round_s))
        taken += round_s
        classic += 0.011
    assert taken > classic  # it does lose something
    assert taken <= 1.05 * classic * 1.02 + 9 * 0.011


def test_prefill_rows_share_the_step() -> None:
    policy = batch_policy()
    for _ in range(3):
        policy.observe_step(step_outcome([outcome(0, 0, 0.0102)], 0.0102))
    step = StepView(rounds=[view()], prefill_rows=6, prefill_kv=6)
    assert 0 <= policy.choose_step(step)[0].k <= 3  # rows beyond eight are dear
    unknown = StepView(rounds=[view()], prefill_rows=200, prefill_kv=200)
    assert policy.choose_step(unknown)[0].reason.startswith("unmeasured")
    rounds = [outcome(1, 1, 0.0116)]
    policy.observe_step(
        StepOutcome(
            rounds=rounds, draft_s=0, verify_s=0.0116, round_s=0.0116, prefill_rows=6, prefill_kv=6
        )
    )
    assert policy.ledger.debt_s == 0.0


def test_never_more_than_fits() -> None:
    policy = MeasuredPolicy(paid=False, max_k=5)
    world = flat_world(1.0, free=True)
    calibrate(policy, world)
    run(world, policy, random.Random(0), num_rounds=50)
    for remaining in range(1, 9):
        for proposed in range(9):
            for ceiling in range(9):
                seen = RoundView(
                    remaining=remaining, context_len=100, proposed=proposed, ceiling=ceiling
                )
                assert policy.choose(seen).k <= min(remaining - 1, proposed, ceiling, 5)
    assert policy.choose(view(proposed=7)).k == 5


def test_hot_device_is_followed() -> None:
    """mlx-dspark: a hot device calibrated a cap that was too low for ever."""
    world = replace(
        flat_world(0.7, free=False, ceiling=3),
        forward_s=lambda rows, context_len, now: (
            0.01 * (1.0 + (0.05 if now > 1500 else 0.9) * (rows - 1))
        ),
    )
    policy = MeasuredPolicy()
    hot = replace(world, forward_s=lambda rows, context_len, now: 0.01 * (0.1 + 0.9 * rows))
    calibrate(policy, hot)
    steps = run(world, policy, random.Random(5), num_rounds=6000)
    assert share_drafting(steps[:1500]) < 0.05
    assert share_drafting(steps[-500:]) > 0.8


def test_budget_spent_is_said() -> None:
    policy = MeasuredPolicy()
    world = flat_world(0.9, free=False)
    calibrate(policy, world)
    run(world, policy, random.Random(0), num_rounds=30)
    policy.ledger.debt_s = 1.0
    decision = policy.choose(view())
    assert decision.k == 0
    assert decision.reason.startswith("decline: the loss budget is spent: 1000.0 of ")


def test_classic_step_is_measured_again_while_drafting_pays() -> None:
    world = flat_world(0.9, free=False)
    policy = MeasuredPolicy()
    calibrate(policy, world)
    steps = run(world, policy, random.Random(0), num_rounds=3000, context_len=100)
    classic = [index for index, step in enumerate(steps) if step.k == 0]
    assert max(b - a for a, b in itertools.pairwise(classic)) <= 512 + 1
    assert len(classic) < 60


def test_request_has_verdict_reason_and_speedup() -> None:
    policy = MeasuredPolicy()
    request = policy.request(7)
    assert request.verdict == "unmeasured"
    assert request.predicted_speedup is None
    world = flat_world(0.9, free=False)
    calibrate(policy, world)
    run(world, request, random.Random(0), num_rounds=200)
    assert request.verdict == "enable"
    assert request.reason.startswith("enable: a round of ")
    assert request.predicted_speedup == pytest.approx(
        world.best(100)[1] * world.round_s(0, 100, 0), rel=0.15
    )
    assert list(policy.requests) == [7]
    policy.forget(7)
    assert not policy.requests


def test_truncated_last_round_teaches_no_miss() -> None:
    policy = MeasuredPolicy()
    cut = replace(outcome(4, 4, 0.01), emitted=2)
    policy.observe(cut)
    assert policy.requests[0].acceptance.paid.trials(3) == 0


def test_shadow_is_paid_from_half_of_the_leak() -> None:
    world = replace(
        flat_world(0.0, free=False, per_row=0.5, ceiling=3), draft_s=lambda k: 0.0005 * k
    )
    policy = MeasuredPolicy()
    calibrate(policy, world)
    for k in (1, 2, 3):
        policy.cost.drafting.calibrate(k, 0.0005 * k)
    run(world, policy, random.Random(0), num_rounds=2000)
    before = policy.rounds
    steps = run(world, policy, random.Random(1), num_rounds=2000, start=before)
    lost = sum(step.round_s for step in steps) / sum(
        world.round_s(0, step.context_len, 0) for step in steps
    )
    assert lost - 1.0 < 0.007 + 0.002  # the leak, and noise of the rounds' own times


def test_shadows_go_on_where_a_wide_round_could_pay() -> None:
    """A fixed cost that k = 1 can never earn back, and k = 7 can."""
    costs = {1: 0.010, **{rows: 0.024 + 0.001 * rows for rows in range(2, 9)}}
    world = replace(world_with(costs, 0.0, 7), draft_s=lambda k: 0.0001 * k)
    policy = MeasuredPolicy()
    calibrate(policy, world)
    shadows = 0
    for _ in range(300):
        decision = policy.choose(view())
        shadows += decision.shadow > 0
        run(world, policy, random.Random(0), num_rounds=1)
    assert shadows > 0


def test_untimed_drafter_is_presumed_slow_by_the_ledger() -> None:
    policy = MeasuredPolicy()
    world = flat_world(0.9, free=False)
    calibrate(policy, world)
    assert policy.cost.worst_s(4, 100, [3], 0.01) > 0.01 + 3 * 0.5 * 0.01
    policy.cost.drafting.calibrate(3, 0.0003)
    assert policy.cost.worst_s(4, 100, [3], 0.01) < 0.015
