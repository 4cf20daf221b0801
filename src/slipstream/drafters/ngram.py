"""Prompt and output lookup: propose what followed the last few tokens the last time they occurred.

Text repeats itself: code repeats names, summaries quote, tables repeat their shape. The drafter
indexes every pair of tokens of prompt and output as they are committed, follows the occurrences of
the pair that ends at the anchor from the latest backwards, and proposes what came after the one
that agrees with most of the tokens before it. Indexing costs a constant per token and a lookup a
constant per round: it is done in every round of every request, also where nothing ever repeats.
This is prompt lookup decoding (Saxena 2023; "LLMA", Yang et al. 2023, arXiv 2304.04487).

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
# Occurrences that are looked at: a pair of tokens that came more often says little by itself.
MAX_OCCURRENCES = 64


class NGramDrafter:
    """Looks the last n tokens of one sequence up in that sequence.

    Args:
        longest, shortest: lengths of match; the longest wins, among equals the latest.
    """

    name = "ngram"
    max_k = MAX_K
    free = True

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._longest = longest
        self._shortest = shortest
        # For each n-gram of the shortest length, the index of the token after its latest
        # occurrence; for each index, that of the occurrence before it. 0 is none.
        self._latest: dict[tuple[int, ...], int] = {}
        self._before = [0] * shortest

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
        index = self._latest.get(tuple(token_ids[end - self._shortest : end]), 0)
        return _copy(token_ids, self._best(token_ids, index), k) if index else []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing: what was committed is indexed, what was rejected is forgotten."""

    def release(self) -> None:
        """Forget the sequence."""
        self._latest.clear()
        self._before = [0] * self._shortest

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that something follows: all but the one that ends at the anchor."""
        if len(token_ids) < len(self._before):  # a shorter text is another text
            self.release()
        latest, before, shortest = self._latest, self._before, self._shortest
        for end in range(len(before), len(token_ids)):
            key = tuple(token_ids[end - shortest : end])
            before.append(latest.get(key, 0))
            latest[key] = end

    def _best(self, token_ids: Sequence[int], index: int) -> int:
        """Return the occurrence that agrees with most tokens, from `index` backwards."""
        best, longest = index, self._shortest
        end = len(token_ids)
        for _ in range(MAX_OCCURRENCES):
            length = self._shortest
            while length < self._longest and length < index:
                if token_ids[index - length - 1] != token_ids[end - length - 1]:
                    break
                length += 1
            if length > longest:
                best, longest = index, length
            index = self._before[index]
            if longest == self._longest or not index:
                break
        return best


def _copy(token_ids: Sequence[int], start: int, k: int) -> list[int]:
    """Return k tokens from `start` on, running on into the copy itself."""
    copied = list(token_ids[start : start + k])
    while len(copied) < k:
        copied.extend(copied[: k - len(copied)])
    return copied
