"""Free scoring: proposals against what is emitted."""

from __future__ import annotations

from slipstream.policy.scoring import MAX_LIVE, Scoring


def test_a_proposal_is_followed_until_it_is_wrong() -> None:
    scoring = Scoring()
    scoring.propose([5, 6, 7])
    assert scoring.emitted([5]) == ((1, True),)
    assert scoring.emitted([9]) == ((2, False),)
    assert scoring.emitted([7]) == ()


def test_a_proposal_that_was_right_is_used_up() -> None:
    scoring = Scoring()
    scoring.propose([5, 6])
    assert scoring.emitted([5, 6, 7]) == ((1, True), (2, True))
    assert scoring.emitted([7]) == ()


def test_proposals_of_successive_steps_are_scored_at_their_own_positions() -> None:
    scoring = Scoring()
    scoring.propose([5, 6, 7])
    scoring.emitted([5])
    scoring.propose([6, 8])
    assert scoring.emitted([6]) == ((2, True), (1, True))
    assert scoring.emitted([8]) == ((3, False), (2, True))


def test_empty_proposals_and_cleared_ones_score_nothing() -> None:
    scoring = Scoring()
    scoring.propose([])
    assert scoring.emitted([1]) == ()
    scoring.propose([1])
    scoring.clear()
    assert scoring.emitted([1]) == ()


def test_the_oldest_proposal_gives_way() -> None:
    scoring = Scoring()
    for _ in range(MAX_LIVE + 5):
        scoring.propose([1, 1])
    assert len(scoring.emitted([1])) == MAX_LIVE
