"""What holds until more is learned: plans that stand, steps that are learned from together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slipstream.policy.base import RoundOutcome, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.options import Limits
from slipstream.policy.terms import LEARN_EVERY, LEARN_LOSS
from tests.policy.worlds import batch_step, calibrate, flat_world, outcome, step_outcome, view

STEP_S = 0.01


def ready(*, free: bool = False, chance: float = 0.8, batch: int = 1) -> MeasuredPolicy:
    """Return a policy that knows its costs, a classic step and its drafter."""
    policy = MeasuredPolicy(paid=not free)
    calibrate(policy, flat_world(chance, free=free))
    for k in range(1, 8):
        policy.cost.drafting.calibrate(k, 0.0002 * k)
    for known in policy.acceptance:
        for trial in range(60):
            hits = 4 if trial % 10 < 10 * chance else 0
            known.observe(4, hits, hits + 1)
    for _ in range(4):
        parts = [outcome(0, 0, STEP_S, request=index) for index in range(batch)]
        policy.observe_step(step_outcome(parts, STEP_S))
    return policy


def round_s(k: int) -> float:
    return STEP_S * (1.0 + 0.05 * k) + 0.0002 * k


def drafted(k: int, accepted: int, *, slower: float = 1.0) -> RoundOutcome:
    return outcome(k, accepted, slower * round_s(k), draft_s=0.0002 * k)


def played(policy: MeasuredPolicy, rng: random.Random, rounds: int) -> Iterator[RoundOutcome]:
    """Play rounds of one request at one context; yield each before it is observed."""
    for _ in range(rounds):
        k = policy.choose(view(proposed=rng.choice((0, 3, 7)))).k
        hits = 0
        while hits < k and rng.random() < 0.6:
            hits += 1
        yield drafted(k, hits) if k else outcome(0, 0, STEP_S)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_stands_is_what_would_be_decided_anew(seed: int) -> None:
    policy, rng = ready(), random.Random(seed)
    for done in played(policy, rng, 400):
        policy.observe(done)
        for proposed in (0, 2, 7):
            seen = view(proposed=proposed)
            state, limits = policy.requests[0], [Limits(proposed, 7)]
            step = StepView(rounds=(seen,))
            (anew,) = policy.decider.decide(
                step, [state], limits, None, policy.acceptance, policy.rounds
            )
            decision = policy.choose(seen)
            assert (decision.k, decision.paid) == (anew.k, anew.paid)


def test_a_plan_serves_narrower_limits_and_no_wider_ones() -> None:
    policy = ready()
    wide = policy.choose(view(ceiling=7)).k
    assert wide > 2
    assert policy.choose(view(ceiling=wide)).k == wide
    assert policy.choose(view(ceiling=2)).k <= 2
    policy = ready()
    assert policy.choose(view(ceiling=2)).k <= 2
    assert policy.choose(view(ceiling=7)).k == wide


@pytest.mark.parametrize("seed", range(3))
def test_steps_teach_the_same_whether_they_wait_or_not(seed: int) -> None:
    waits, at_once = ready(), ready()
    for done in played(waits, random.Random(seed), 200):
        waits.observe(done)
        at_once.observe(done)
        at_once.learn()
    waits.learn()
    assert waits.snapshot()["acceptance"] == at_once.snapshot()["acceptance"]
    assert waits.snapshot()["cost"] == at_once.snapshot()["cost"]


def test_every_step_is_charged_at_once_and_learned_from_in_time() -> None:
    policy = ready()
    samples, waited = policy.cost.verify.samples(6), 0
    while policy.cost.verify.samples(6) == samples:
        owed = policy.ledger.net_s
        policy.observe(drafted(5, 1))
        assert policy.ledger.net_s - owed == pytest.approx(round_s(5) - 2 * STEP_S, rel=0.04)
        waited += 1
    assert LEARN_EVERY // 2 < waited <= LEARN_EVERY


def test_a_request_that_ends_has_taught_everything() -> None:
    policy = ready()
    before = policy.acceptance.paid.trials(1)
    policy.observe(drafted(5, 0))
    policy.forget(0)
    assert policy.acceptance.paid.trials(1) > before


@pytest.mark.parametrize(
    "other",
    [
        replace(outcome(5, 0, round_s(5)), request=9),
        replace(outcome(5, 0, round_s(5)), fixed=True),
        replace(outcome(5, 0, round_s(5)), context_len=600),
        replace(outcome(0, 0, STEP_S), shadow_scores=((1, True),)),
    ],
)
def test_a_step_of_another_kind_is_learned_from_at_once(other: RoundOutcome) -> None:
    policy = ready()
    policy.observe(drafted(5, 0))
    samples = policy.cost.verify.samples(6) + policy.cost.verify.samples(1)
    policy.observe(other)
    assert policy.cost.verify.samples(6) + policy.cost.verify.samples(1) >= samples + 2


@pytest.mark.parametrize("chance", [0.1, 0.8])
@pytest.mark.parametrize("offers", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_stands_while_drafters_fall_behind_is_what_would_be_decided_anew(
    seed: int, offers: bool, chance: float
) -> None:
    """Two sequences; what one emits without its paid drafter, that has to read before it drafts."""
    policy, rng = ready(chance=chance, batch=2), random.Random(seed)
    policy.cost.drafting.calibrate_reading(0.00004)
    behind = [0, 30]
    for _ in range(300):
        step = StepView(
            rounds=[
                replace(view(request=index, proposed=offers * rng.choice((0, 4))), behind=missing)
                for index, missing in enumerate(behind)
            ]
        )
        states = [policy.requests[index] for index in range(2)]
        limits = [Limits(part.proposed, 7) for part in step.rounds]
        pairing = policy.acceptance
        anew = policy.decider.decide(step, states, limits, None, pairing, policy.rounds)
        decisions = policy.choose_step(step)
        assert [(d.k, d.paid, d.shadow) for d in decisions] == [
            (d.k, d.paid, d.shadow) for d in anew
        ]
        parts = []
        for index, chosen in enumerate(decisions):
            hits = 0
            while hits < chosen.k and rng.random() < chance:
                hits += 1
            asked = chosen.shadow or (chosen.k if chosen.paid else 0)
            read, behind[index] = (behind[index], 0) if asked else (0, behind[index] + hits + 1)
            done = outcome(chosen.k, hits, 0.0, request=index, paid=chosen.paid)
            scores = ((1, rng.random() < chance),) if chosen.shadow else ()
            done = replace(done, caught_up=read, shadow=chosen.shadow, shadow_scores=scores)
            parts.append(done)
        draft_s = 0.0002 * sum([d.k * d.paid + d.shadow for d in decisions])
        draft_s += 0.00004 * sum([part.caught_up for part in parts])
        verify_s = STEP_S * (1.0 + 0.05 * sum([d.k for d in decisions]))
        policy.observe_step(
            StepOutcome(
                rounds=parts, draft_s=draft_s, verify_s=verify_s, round_s=verify_s + draft_s
            )
        )


def declining() -> MeasuredPolicy:
    """Return a policy whose paid drafter reads first and does not pay."""
    policy = ready(chance=0.0)
    policy.cost.drafting.calibrate_reading(0.00004)
    for _ in range(4):
        policy.observe(outcome(0, 0, STEP_S))
    return policy


def test_a_plan_to_draft_is_for_just_what_the_drafter_has_to_read() -> None:
    policy = ready()
    policy.cost.drafting.calibrate_reading(0.00004)
    assert policy.choose(view()).k > 0
    assert policy.choose(replace(view(), behind=100_000)).k == 0
    assert policy.choose(view()).k > 0


def test_declining_stands_while_the_pause_grows_and_not_when_it_is_over() -> None:
    policy = declining()
    seen = replace(view(), behind=50)
    policy.choose(seen)
    made = policy.choose(seen)
    assert made.k == 0
    assert policy.choose(replace(seen, behind=60)) is made
    assert policy.choose(replace(seen, behind=49)) is not made
    policy = declining()
    made = policy.choose(view())
    assert policy.choose(replace(view(), behind=1)) is not made


def test_a_shadow_that_waits_until_nothing_is_owed_is_drafted_then() -> None:
    policy = declining()
    policy.ledger.debt_s = STEP_S
    state = policy.requests[0]
    state.started_at = state.shadowed_at = policy.rounds - 63
    seen = replace(view(), behind=600)
    assert policy.choose(seen).shadow == 0
    policy.observe(outcome(0, 0, STEP_S))
    assert policy.choose(seen).shadow == 0
    policy.ledger.debt_s = 0.0
    assert policy.choose(seen).shadow > 0


@pytest.mark.parametrize("k", [0, 4])
def test_what_was_read_is_learned_at_once_and_the_machine_is_not_blamed(k: int) -> None:
    policy = ready()
    policy.cost.drafting.calibrate_reading(0.00004)
    policy.ledger.banked_s = 10 * STEP_S
    policy.observe(drafted(5, 0))
    owed, read_s = policy.ledger.debt_s, 4 * STEP_S  # twice what was believed
    read = outcome(k, 0, round_s(k) + read_s, draft_s=0.0002 * k + read_s)
    expected = policy.observe_step(
        StepOutcome(
            rounds=[replace(read, caught_up=500)],
            draft_s=read.draft_s,
            verify_s=read.verify_s,
            round_s=read.round_s,
        )
    )
    believed_s = round_s(k) + read_s / 2 if k else None
    assert expected.round_s == (believed_s and pytest.approx(believed_s, rel=0.02))
    assert policy.cost.drafting.catch_up_s(500) > 1.05 * read_s / 2
    assert policy.ledger.forgiven_s == 0.0
    assert policy.ledger.debt_s - owed == pytest.approx(read.round_s - STEP_S, rel=0.02)


def test_reading_takes_longer_on_a_machine_that_became_slower() -> None:
    policy = ready()
    policy.cost.drafting.calibrate_reading(0.00004)
    policy.cost.drafting.scale(1.8, 10)
    assert policy.cost.drafting.catch_up_s(10) == pytest.approx(1.8 * 0.0004)


@pytest.mark.parametrize("saved", [False, True])
def test_what_loses_is_learned_from_soon(saved: bool) -> None:
    """A loss that savings pay for is one as well."""
    policy = ready()
    if saved:
        policy.ledger.saved_s = 30 * STEP_S
        policy.learn()
        policy.observe(drafted(5, 5))
    samples, lost_s = policy.cost.verify.samples(8), 0.0
    while policy.cost.verify.samples(8) == samples:
        lost_s += round_s(7) - STEP_S
        policy.observe(drafted(7, 0))
    assert LEARN_LOSS * STEP_S < lost_s < 1.5 * LEARN_LOSS * STEP_S


def test_a_batch_has_plans_that_stand_too() -> None:
    policy = ready(batch=2)
    widths = batch_step(policy, [0, 1])
    assert sum(widths) > 0
    assert batch_step(policy, [0, 1]) == widths
    assert sum(batch_step(policy, [1, 0])) > 0
    assert batch_step(policy, [0]) == [0]  # no classic step of one sequence was timed


def test_a_machine_that_becomes_slower_has_its_classic_step_timed_again_and_is_followed() -> None:
    """Another process takes a core: rounds that draft must not be charged by the old step."""
    policy = ready()
    k = policy.choose(view()).k
    for _ in range(8):
        policy.observe(drafted(k, k))
    slower, unrun = 1.8, policy.cost.verify.time_s(3, 100) or 0.0
    rounds = 0
    while policy.choose(view()).k:
        policy.observe(drafted(policy.choose(view()).k, k, slower=slower))
        rounds += 1
    assert rounds <= 3
    classic = 0
    while not policy.choose(view()).k:
        policy.observe(outcome(0, 0, slower * STEP_S))
        classic += 1
    assert classic <= 7
    assert policy.cost.classic_s(1, 100) == pytest.approx(slower * STEP_S, rel=0.02)
    assert policy.cost.verify.time_s(3, 100) == pytest.approx(slower * unrun, rel=0.05)
    assert policy.cost.drafting.times(1)[2] == pytest.approx(slower * 0.0004, rel=0.05)


def test_one_slow_round_is_no_change() -> None:
    policy = ready()
    for number in range(60):
        k = policy.choose(view()).k
        policy.observe(
            drafted(k, k, slower=2.0 if number % 3 == 2 else 1.0) if k else outcome(0, 0, STEP_S)
        )
        if number % 3 == 2:
            assert not policy.choose(view()).reason.startswith("classic")
    assert policy.cost.classic_s(1, 100) == pytest.approx(STEP_S, rel=0.01)


def test_what_is_expected_of_a_step_is_said_before_it_is_learned_from() -> None:
    policy = ready()
    slow = StepOutcome(
        rounds=[drafted(4, 2, slower=1.2)], draft_s=0.0008, verify_s=0.014, round_s=0.0155
    )
    expected = policy.observe_step(slow)
    assert expected.classic_s == pytest.approx(STEP_S)
    assert expected.round_s == pytest.approx(round_s(4), rel=0.03)
    assert policy.observe_step(step_outcome([outcome(0, 0, STEP_S)], STEP_S)).round_s is None
