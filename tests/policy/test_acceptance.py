"""Acceptance: conditional on the prefix, censored and truncated rounds, changes of text."""

from __future__ import annotations

import random

import pytest

from slipstream.policy.acceptance import FIRST_GUESS, Acceptance


def test_positions_are_conditional_on_their_prefix() -> None:
    acceptance = Acceptance()
    rng = random.Random(0)
    true = [0.9, 0.5, 0.8]
    for _ in range(4000):
        hits = [rng.random() < chance for chance in true]
        accepted = hits.index(False) if False in hits else 3
        acceptance.observe(3, accepted, accepted + 1)
    assert acceptance.chances[:3] == pytest.approx(true, abs=0.12)
    assert acceptance.survival[1] == pytest.approx(acceptance.chances[0] * acceptance.chances[1])
    assert acceptance.expected[2] == pytest.approx(sum(acceptance.survival[:2]))


def test_a_censored_round_says_nothing_about_the_next_position() -> None:
    acceptance = Acceptance()
    acceptance.observe(2, 2, 3)
    assert [acceptance.trials(position) for position in (1, 2, 3)] == [1.0, 1.0, 0.0]


def test_a_truncated_round_says_nothing_behind_the_cut() -> None:
    acceptance = Acceptance()
    acceptance.observe(4, 4, 2)
    assert [acceptance.trials(position) for position in (1, 2, 3)] == [1.0, 1.0, 0.0]
    cut_at_the_miss = Acceptance()
    cut_at_the_miss.observe(4, 2, 2)  # the bonus token was cut off: whether 3 missed is not known
    assert cut_at_the_miss.trials(3) == 0.0


def test_a_miss_counts_once() -> None:
    acceptance = Acceptance()
    acceptance.observe(4, 1, 2)
    assert [acceptance.trials(position) for position in (1, 2, 3)] == [1.0, 1.0, 0.0]
    assert acceptance.chances[1] < acceptance.chances[0]


def test_positions_never_reached_are_like_the_one_before() -> None:
    acceptance = Acceptance()
    assert acceptance.chances == [FIRST_GUESS] * 15
    for _ in range(100):
        acceptance.observe(2, 2, 3)
    assert acceptance.chances[14] == pytest.approx(acceptance.chances[1])


def test_a_change_of_text_is_noticed_within_a_few_trials() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(3, 0, 1)
    assert acceptance.chances[0] < 0.05
    for _ in range(16):
        acceptance.observe(3, 3, 4)
    assert acceptance.chances[0] > 0.5


def test_a_request_starts_from_what_its_pairing_knows() -> None:
    pairing = Acceptance()
    for _ in range(50):
        pairing.observe(3, 3, 4)
    request = Acceptance(pairing.state())
    assert request.expected[3] == pytest.approx(pairing.expected[3], rel=1e-3)


def test_scoring_counts_as_verifying_does() -> None:
    verified, scored = Acceptance(), Acceptance()
    verified.observe(3, 1, 2)
    scored.score([(1, True), (2, False)])
    assert scored.chances == pytest.approx(verified.chances)
    assert scored.expected == pytest.approx(verified.expected)


def test_optimism_is_above_belief_and_fades() -> None:
    acceptance = Acceptance()
    early = acceptance.optimistic()[2] - acceptance.survival[2]
    for index in range(200):
        acceptance.observe(3, 3 if index % 2 else 0, 4 if index % 2 else 1)
    late = acceptance.optimistic()[2] - acceptance.survival[2]
    assert 0 < late < early
