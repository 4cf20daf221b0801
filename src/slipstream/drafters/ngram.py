"""Prompt and output lookup: propose what followed the last few tokens the last time they occurred.

Text repeats itself: code repeats names, summaries quote, tables repeat their shape. The drafter
indexes every n-gram of prompt and output by hash as tokens are committed, looks up the n-gram that
ends at the anchor (longest n first) and proposes what came after its most recent occurrence.
Indexing costs a constant per token, a lookup a constant per round; nothing is scanned twice.
is prompt lookup decoding (Saxena 2023; "LLMA", Yang et al. 2023, arXiv 2304.04487).

A continuation that reaches the end of the text goes on into the proposal itself, as LZ77 copies
do, so a loop of any period is proposed to the full width.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import MAX_K

# Replayed on code, prose and licence texts of up to 4,000 tokens, k = 4: keys up to 6 gave at most
# 0.2 % more tokens a round than keys up to 4.
LONGEST = 4
# On the same texts single tokens gave 5 to 12 % more tokens a round, for 2 to 3 times as many
# rounds that draft and 1.5 to 2 times the drafts per accepted one.
SHORTEST = 2


class NGramDrafter:
    """Looks the last n tokens of one sequence up in that sequence.

    Args:
        longest, shortest: n-gram lengths tried, longest first.
    """

    name = "ngram"
    max_k = MAX_K
    free = True

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        # For each n-gram the index of the token after its most recent occurrence.
        self._next: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return k tokens that followed the sequence's last n-gram before, or none.

        Args:
            token_ids: all committed tokens; between calls it only grows at its end.
            k: tokens wanted.
        """
        self._index(token_ids)
        if k < 1:
            return []
        end = len(token_ids)
        for n in self._lengths:
            start = self._next.get(tuple(token_ids[end - n : end])) if n <= end else None
            if start is not None:
                return _copy(token_ids, start, k)
        return []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing: what was committed is indexed, what was rejected is forgotten."""

    def release(self) -> None:
        """Forget the sequence."""
        self._next.clear()
        self._num_indexed = 0

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that something follows: all but the one that ends at the anchor."""
        if len(token_ids) - 1 < self._num_indexed:  # a shorter text is another text
            self.release()
        for end in range(self._num_indexed + 1, len(token_ids)):
            for n in self._lengths:
                if n <= end:
                    self._next[tuple(token_ids[end - n : end])] = end
        self._num_indexed = max(len(token_ids) - 1, 0)


def _copy(token_ids: Sequence[int], start: int, k: int) -> list[int]:
    """Return k tokens from `start` on, running on into the copy itself."""
    copied = list(token_ids[start : start + k])
    while len(copied) < k:
        copied.extend(copied[: k - len(copied)])
    return copied
