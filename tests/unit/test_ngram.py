"""The n-gram drafter against a scan of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafters.ngram import LONGEST, SHORTEST, NGramDrafter

TEXTS = st.lists(st.integers(0, 2), max_size=60)  # three ids, so that n-grams recur


def by_scan(ids: Sequence[int], k: int) -> list[int]:
    """Propose as the drafter should, by scanning back for the longest, then latest match."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(ids) - 1, n - 1, -1):
            if len(ids) >= n and list(ids[start - n : start]) == list(ids[len(ids) - n :]):
                text = list(ids)
                for i in range(k):
                    text.append(text[start + i])
                return text[len(ids) :]
    return []


@given(TEXTS, st.integers(0, 15))
def test_proposal_equals_a_scan_of_the_whole_text(ids: list[int], k: int) -> None:
    assert NGramDrafter().propose(ids, k) == by_scan(ids, k)


@given(st.lists(st.tuples(TEXTS, st.integers(0, 15)), max_size=8))
def test_growing_text_proposes_as_a_fresh_index_does(steps: list[tuple[list[int], int]]) -> None:
    drafter, text = NGramDrafter(), [1]
    for more, k in steps:
        text += more  # what a round committed; rejected drafts never come here
        assert drafter.propose(text, k) == by_scan(text, k)
        drafter.observe([0] * k, 0)


@given(TEXTS)
def test_narrower_proposal_is_a_prefix_of_a_wider_one(ids: list[int]) -> None:
    widest = NGramDrafter().propose(ids, 15)
    for k in range(16):
        assert NGramDrafter().propose(ids, k) == widest[:k]


@given(TEXTS, TEXTS)
def test_release_forgets_the_text(before: list[int], after: list[int]) -> None:
    drafter = NGramDrafter()
    drafter.propose(before, 4)
    drafter.release()
    assert drafter.propose(after, 4) == by_scan(after, 4)


@given(TEXTS, st.integers(0, 60))
def test_a_shorter_text_is_indexed_anew(ids: list[int], keep: int) -> None:
    drafter = NGramDrafter()
    drafter.propose(ids, 4)
    cut = ids[: min(keep, max(len(ids) - 1, 0))]
    assert drafter.propose(cut, 4) == by_scan(cut, 4)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    ids = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert NGramDrafter().propose(ids, 2) == [50, 9]


def test_the_latest_of_equal_matches_wins() -> None:
    assert NGramDrafter().propose([1, 2, 50, 1, 2, 60, 1, 2], 2) == [60, 1]


def test_a_loop_is_proposed_to_the_full_width() -> None:
    assert NGramDrafter().propose([7, 8, 9] * 2, 15) == [7, 8, 9] * 5


def test_a_text_that_repeats_nothing_has_no_proposal() -> None:
    assert NGramDrafter().propose(range(50), 15) == []


class CountedText(list[int]):
    """A text that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_a_round_reads_a_constant_number_of_tokens_however_long_the_context() -> None:
    reads = []
    for length in (100, 10_000):
        drafter, text = NGramDrafter(), CountedText(i * i % 97 for i in range(length))
        drafter.propose(text, 15)
        text.num_read = 0
        text.extend([1, 2, 3])
        drafter.propose(text, 15)
        reads.append(text.num_read)
    assert reads[0] == reads[1] < 100
