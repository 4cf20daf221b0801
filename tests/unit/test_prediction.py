"""A prediction is followed, left where the reply deviates, and found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from slipstream.drafters.prediction import PredictedText, PredictionDrafter
from slipstream.types import MAX_K

PROMPT = [900, 901, 902]
# Distinct tokens, but for a phrase that comes three times.
PREDICTION = [*range(40), 7, 8, 9, *range(40, 60), 7, 8, 9, *range(60, 80)]


def drafter_of(prediction: Sequence[int] = PREDICTION) -> PredictionDrafter:
    """Return a drafter that has read nothing yet."""
    return PredictionDrafter(PredictedText(prediction), len(PROMPT))


def after(reply: Sequence[int], k: int, prediction: Sequence[int] = PREDICTION) -> list[int]:
    """Return what is proposed after a reply that came in one piece."""
    return drafter_of(prediction).propose([*PROMPT, *reply], k)


def accepted(reply: Sequence[int], prediction: Sequence[int], k: int = 4) -> tuple[int, int]:
    """Run a reply through a drafter; return its rounds and the tokens that were accepted."""
    drafter, done, rounds, total = drafter_of(prediction), 0, 0, 0
    while done < len(reply):
        drafts = drafter.propose([*PROMPT, *reply[:done]], k)
        right = 0
        for draft, token_id in zip(drafts, reply[done:], strict=False):
            if draft != token_id:
                break
            right += 1
        rounds, total, done = rounds + 1, total + right, done + right + 1
    return rounds, total


def test_a_reply_that_keeps_to_the_prediction_is_proposed_to_its_end() -> None:
    for done in range(len(PREDICTION) + 1):
        assert after(PREDICTION[:done], 5) == PREDICTION[done : done + 5]
    assert accepted(PREDICTION, PREDICTION, 4) == (len(PREDICTION) // 5 + 1, 69)


@pytest.mark.parametrize("k", [1, 2, 7, MAX_K])
def test_a_smaller_k_gives_the_beginning_of_the_same_proposal(k: int) -> None:
    draw = random.Random(k)
    for _ in range(50):
        reply = [draw.choice(PREDICTION) for _ in range(draw.randrange(12))]
        assert after(reply, MAX_K)[:k] == after(reply, k)


def test_after_a_replaced_token_it_goes_on_behind_it() -> None:
    assert after([0, 1, 500], 3) == [3, 4, 5]
    assert after([0, 1, 500, 3], 3) == [4, 5, 6]
    assert after([500], 2) == [1, 2]


def test_after_an_insertion_it_finds_its_place_again() -> None:
    assert after([0, 1, 500, 501], 3) == []
    assert after([0, 1, 500, 501, 502, 2], 3) == [3, 4, 5]
    assert after([0, 1, 500, 501, 502, 2, 3], 3) == [4, 5, 6]


def test_after_a_deletion_it_finds_its_place_again() -> None:
    assert after([0, 1, 5], 3) == [6, 7, 8]  # one token is believed close by
    assert after([0, 1, 30], 3) == [3, 4, 5]  # and not far away
    assert after([0, 1, 30, 31], 3) == [32, 33, 34]


def test_after_a_move_it_follows() -> None:
    reply = [*range(40, 60), 0, 1, 2]
    assert after([40, 41], 3) == [42, 43, 44]
    assert after(reply, 3) == [3, 4, 5]


def test_of_several_places_the_one_that_agrees_most_is_taken_then_the_nearest() -> None:
    assert after([700, 59, 7, 8, 9], 2) == [60, 61]
    assert after([700, 39, 7, 8, 9], 2) == [40, 41]
    assert after([700, 701, 8, 9], 2) == [10, 11]


def test_nothing_is_proposed_where_there_is_nothing_to_follow() -> None:
    assert after([], 3, []) == []
    assert after([], 0) == []
    assert after([500, 501, 502], 4) == []
    assert after(PREDICTION, 4) == []
    assert after([*PREDICTION, 500], 4) == []
    assert after([1, 2], 4, [5]) == []


def test_a_forgotten_sequence_starts_again() -> None:
    drafter = drafter_of()
    drafter.propose([*PROMPT, *PREDICTION[:20]], 4)
    drafter.observe([1, 2], 1)
    drafter.release()
    assert drafter.propose(PROMPT, 3) == [0, 1, 2]


def test_reading_token_by_token_or_at_once_is_the_same() -> None:
    draw = random.Random(3)
    for _ in range(100):
        prediction = [draw.randrange(12) for _ in range(draw.randrange(40))]
        reply = [draw.randrange(12) for _ in range(30)]
        drafter, done = drafter_of(prediction), 0
        while done < len(reply):
            done += draw.randrange(1, 6)
            offered = drafter.propose([*PROMPT, *reply[:done]], draw.randrange(6))
            if offered:
                assert offered == after(reply[:done], len(offered), prediction)


def test_an_edited_copy_is_mostly_drafted() -> None:
    draw = random.Random(5)
    prediction = [draw.randrange(3000) for _ in range(1000)]
    reply: list[int] = []
    for token_id in prediction:  # an edit every 25 tokens or so
        kind = draw.random()
        if kind < 0.015:
            continue
        reply.append(token_id if kind > 0.03 else draw.randrange(3000))
        if kind > 0.99:
            reply += [draw.randrange(3000) for _ in range(3)]
    rounds, total = accepted(reply, prediction, 7)
    assert total > 0.8 * len(reply)
    assert len(reply) / rounds > 5


def test_a_prediction_that_repeats_one_token_is_looked_up_in_bounded_work() -> None:
    prediction = [1] * 5000 + [2]
    drafter = drafter_of(prediction)
    assert drafter.propose([*PROMPT, *[1] * 30, 3, 1, 1], 3) == [1, 1, 1]
