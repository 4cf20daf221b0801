"""Greedy acceptance and the cut at a stop or limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.accept import accept_drafts, cut

TOKENS = st.integers(0, 3)


def test_the_docstring_s_example() -> None:
    assert accept_drafts([5, 6, 7], [5, 6, 9, 2]) == (2, [5, 6, 9])


def test_a_classic_step_emits_the_target_s_choice() -> None:
    assert accept_drafts([], [4]) == (0, [4])


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=15), TOKENS)
def test_accepted_is_the_longest_equal_prefix(pairs: list[tuple[int, int]], bonus: int) -> None:
    drafts = [draft for draft, _ in pairs]
    choices = [choice for _, choice in pairs] + [bonus]
    accepted, emitted = accept_drafts(drafts, choices)
    assert accepted == max(n for n in range(len(drafts) + 1) if drafts[:n] == choices[:n])
    assert emitted == choices[: accepted + 1]


@given(st.lists(TOKENS, min_size=1, max_size=16), st.sets(TOKENS), st.integers(1, 20))
def test_cut_keeps_the_stop_and_nothing_after(
    emitted: list[int], stops: set[int], remaining: int
) -> None:
    kept, reason = cut(emitted, stops, remaining)
    assert kept == emitted[: len(kept)]
    assert 1 <= len(kept) <= remaining
    assert not stops & set(kept[:-1])
    if reason == "stop":
        assert kept[-1] in stops
    else:
        assert kept[-1] not in stops
        assert (reason == "length") == (len(kept) == remaining)
        assert reason == "length" or kept == emitted


def test_a_stop_that_is_the_last_token_allowed_is_a_stop() -> None:
    assert cut([1, 2], {2}, 2) == ([1, 2], "stop")


def test_a_stop_beyond_the_limit_is_never_seen() -> None:
    assert cut([1, 2, 3], {3}, 2) == ([1, 2], "length")
