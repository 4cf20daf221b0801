"""A drafter that fell behind reads first: that is in the price, once, and in what is at stake."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slipstream.policy.base import StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.draft_cost import LEAST_READ, WORST_DRAFT, DraftCost
from slipstream.policy.options import CATCH_UP_ROUNDS
from slipstream.policy.profile_check import is_sound
from slipstream.policy.simulator import Step, World, run
from tests.policy.worlds import calibrate, flat_world, outcome, share_drafting, step_outcome, view

STEP_S = 0.01
DRAFT_S = 0.0004  # a drafted token
READ_S = 0.00004  # a token that is read to catch up


def pairing(chance: float = 0.8) -> MeasuredPolicy:
    """Return a policy that knows its costs, and how often drafts are right."""
    policy = MeasuredPolicy()
    calibrate(policy, flat_world(0.5, free=False))
    for k in range(1, 8):
        policy.cost.drafting.calibrate(k, DRAFT_S * k)
    policy.cost.drafting.calibrate_reading(READ_S)
    for _ in range(3):
        policy.observe(outcome(0, 0, STEP_S))
    for trial in range(100):
        hits = 4 if (7 * trial) % 10 < 10 * chance else 0
        policy.acceptance.paid.observe(4, hits, hits + 1)
    policy.forget(0)
    return policy


def test_a_drafter_that_is_not_behind_costs_what_it_did() -> None:
    assert pairing().choose(view()) == pairing().choose(replace(view(), behind=0))
    assert DraftCost().catch_up_s(0) == 0.0


def test_the_longer_the_pause_the_dearer_it_is_to_go_on() -> None:
    policy = pairing()
    ks = [policy.choose(replace(view(), behind=behind)).k for behind in (0, 100, 100_000)]
    assert ks[0] > 0
    assert ks[1] > 0
    assert ks[2] == 0


def test_what_is_read_once_is_spread_over_the_rounds_that_follow() -> None:
    policy = pairing()
    # Read in one round it would cost more than the round gains; spread, it does not.
    behind = round(3 * STEP_S / READ_S)
    assert policy.choose(replace(view(), behind=behind)).k > 0
    # A request about to end has no rounds to spread it over.
    assert policy.choose(replace(view(), behind=behind, remaining=4)).k == 0
    assert policy.choose(replace(view(), behind=0, remaining=4)).k > 0


def test_the_loss_budget_is_asked_for_all_of_it_at_once() -> None:
    policy = pairing()
    capacity_s = policy.ledger.capacity_steps * STEP_S
    fits, exceeds = (round(share * capacity_s / READ_S / WORST_DRAFT) for share in (0.8, 1.1))
    assert fits * READ_S / CATCH_UP_ROUNDS < STEP_S / 4
    assert policy.choose(replace(view(), behind=fits)).k > 0
    refused = policy.choose(replace(view(), behind=exceeds))
    assert refused.k == 0
    assert "loss budget" in refused.reason


def test_what_was_read_is_charged_in_full() -> None:
    policy = pairing()
    spent = replace(outcome(0, 0, STEP_S + 0.02, draft_s=0.02), caught_up=500)
    before = policy.ledger.debt_s
    policy.observe_step(
        StepOutcome(rounds=[spent], draft_s=0.02, verify_s=STEP_S, round_s=STEP_S + 0.02)
    )
    assert policy.ledger.debt_s - before == pytest.approx(0.02, rel=0.01)
    # And it was no part of the classic step beside it.
    assert policy.cost.classic_s(1, 100) == pytest.approx(STEP_S)


def test_reading_for_a_width_that_was_asked_for_is_not_charged() -> None:
    policy = pairing()
    policy.observe(outcome(0, 0, STEP_S, request=1))
    spent = replace(outcome(0, 0, STEP_S, draft_s=0.02, request=1), caught_up=500, fixed=True)
    before = policy.ledger.debt_s
    policy.observe_step(
        StepOutcome(rounds=[spent], draft_s=0.02, verify_s=STEP_S, round_s=STEP_S + 0.02)
    )
    assert policy.ledger.debt_s <= before


def test_a_token_that_is_read_is_learned_apart_from_one_that_is_drafted() -> None:
    cost = DraftCost()
    for k in (2, 4):
        cost.calibrate(k, DRAFT_S * k)
    part = replace(outcome(4, 2, STEP_S), caught_up=200)
    step = StepOutcome(
        rounds=[part], draft_s=4 * DRAFT_S + 200 * READ_S, verify_s=STEP_S, round_s=2 * STEP_S
    )
    cost.observe(step, 1, observed_before=True)
    assert cost.catch_up_s(1) == pytest.approx(READ_S)
    assert cost.drafting_s([4]) == pytest.approx(4 * DRAFT_S)  # the long call taught nothing of it


def test_a_few_tokens_teach_nothing() -> None:
    cost = DraftCost()
    cost.calibrate(4, 4 * DRAFT_S)
    part = replace(outcome(4, 2, STEP_S), caught_up=LEAST_READ - 1)
    step = StepOutcome(rounds=[part], draft_s=1.0, verify_s=STEP_S, round_s=1.1)
    cost.observe(step, 1, observed_before=True)
    assert cost.drafting_s([4]) == pytest.approx(4 * DRAFT_S)
    # A token that was never read is held to take what a drafted one takes.
    assert cost.catch_up_s(3) == pytest.approx(3 * DRAFT_S)


def test_what_was_learned_is_in_the_profile_and_old_profiles_still_serve() -> None:
    policy, fresh = pairing(), MeasuredPolicy()
    state = policy.snapshot()
    assert is_sound(state)
    fresh.restore(state)
    assert fresh.cost.drafting.catch_up_s(100) == pytest.approx(100 * READ_S)
    del state["cost"]["reading"]
    assert is_sound(state)
    fresh.restore(state)
    assert fresh.cost.drafting.catch_up_s(1) == pytest.approx(DRAFT_S)
    for damaged in ([[1, 2]], [[0.1, 0.0, 0.1, "x"]], [[1e-5, 0, 0, 1]] * 2, 3):
        state["cost"]["reading"] = damaged
        assert not is_sound(state)


def world(chance: float, **changes: float) -> World:
    """Return a machine whose drafter has a KV of its own."""
    found = flat_world(chance, free=False)
    return replace(found, draft_s=lambda k: DRAFT_S * k, **({"read_s": READ_S} | changes))


def lost_s(steps: list[Step]) -> float:
    """Return the seconds beyond what classic steps would have taken for the same tokens."""
    return sum(step.round_s - step.emitted * STEP_S for step in steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_good_drafter_is_caught_up_with_a_prompt_and_then_drafts(seed: int) -> None:
    policy = pairing()
    steps = run(world(0.8), policy, random.Random(seed), num_rounds=300, context_len=600)
    assert share_drafting(steps) > 0.9
    assert lost_s(steps) < -0.5


@pytest.mark.parametrize("seed", range(5))
def test_a_useless_drafter_costs_no_more_for_owning_a_kv(seed: int) -> None:
    policy = pairing(0.0)
    capacity_s = policy.ledger.capacity_steps * STEP_S
    useless, steps = world(0.0, noise=0.0), []
    for request in range(40):  # each brings a prompt that nobody has read
        steps += run(
            useless,
            policy,
            random.Random(seed),
            num_rounds=100,
            context_len=400,
            request=request,
            start=100 * request,
        )
        policy.forget(request)
    for length in (100, 400, 1600, 4000):  # of any window, as the theorem says
        for first in range(0, len(steps) - length + 1, 50):
            window = steps[first : first + length]
            classic_s = STEP_S * sum(step.emitted for step in window)
            assert lost_s(window) <= 0.01 * classic_s + 1.1 * capacity_s


def test_a_request_that_begins_is_not_shadowed_for_the_price_of_its_prompt() -> None:
    policy = pairing(0.0)
    fresh = policy.choose(replace(view(request=7), behind=400))
    assert (fresh.k, fresh.shadow) == (0, 0)
    assert policy.choose(view(request=7)).shadow > 0  # what is not behind is shadowed at once


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("draft_s", "read_s"), [(0.3 * STEP_S, 0.015 * STEP_S), (DRAFT_S, READ_S)])
def test_a_good_drafter_that_nobody_knows_is_found_out(
    draft_s: float, read_s: float, seed: int
) -> None:
    # At its price what is believed at first (0.6) does not pay, and it is too dear to be shadowed.
    policy = MeasuredPolicy()
    calibrate(policy, flat_world(0.5, free=False))
    for k in range(1, 8):
        policy.cost.drafting.calibrate(k, draft_s * k)
    policy.cost.drafting.calibrate_reading(read_s)
    good = replace(world(0.9, read_s=read_s), draft_s=lambda k: draft_s * k)
    steps: list[Step] = []
    for request in range(3):
        steps += run(
            good,
            policy,
            random.Random(seed),
            num_rounds=200,
            context_len=60,
            request=request,
            start=200 * request,
        )
        policy.forget(request)
    assert share_drafting(steps[300:]) > 0.7


@pytest.mark.parametrize("read_s", [READ_S / 10, READ_S])
@pytest.mark.parametrize("seed", range(5))
def test_text_that_becomes_predictable_is_drafted_again(seed: int, read_s: float) -> None:
    policy = pairing(0.05)

    def chances(now: int) -> list[float]:
        return [0.03 if now < 400 else 0.9] * 7

    changing = replace(world(0.5, read_s=read_s), chances=chances)
    steps = run(changing, policy, random.Random(seed), num_rounds=1200, context_len=100)
    assert share_drafting(steps[100:400]) < 0.1
    assert share_drafting(steps[800:]) > 0.8


def test_in_a_batch_one_pays_for_reading_and_the_others_do_not_wait_for_ever() -> None:
    policy = pairing()
    for _ in range(3):
        parts = [outcome(0, 0, STEP_S, request=index) for index in range(2)]
        policy.observe_step(step_outcome(parts, STEP_S))
    ready, far = (
        policy.choose_step(
            StepView(rounds=[replace(view(request=0), behind=behind), view(request=1)])
        )
        for behind in (0, 100_000)
    )
    assert all(decision.k > 0 for decision in ready)
    assert far[0].k == 0
