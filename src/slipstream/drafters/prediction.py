"""Predicted output: the caller says what the reply will resemble, and drafts are read off it.

A place in the prediction moves along with the reply. Where the reply deviates, the drafter goes on
as if one token had been replaced, and looks the reply's last tokens up in the prediction with every
token that comes: two or more anywhere, a single one close to the place it left; of several
occurrences the one that agrees with most of what came before, then the nearest, ahead first. So it
survives a changed name, an insertion, a deletion and a move. This is OpenAI's `prediction` field,
served as a draft source: the clock changes, never the reply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from slipstream.types import MAX_K

# Tokens around the place it left in which a single equal token is believed: a replaced name or
# number is a few tokens long.
NEAR = 8
# Tokens of agreement that occurrences are compared by.
LONGEST = 8
# Occurrences that are looked at on either side: a pair that came more often says little by itself.
MAX_OCCURRENCES = 32


class PredictedText:
    """A prediction's tokens, and where their pairs occur. Never changed, so choices share it.

    Attributes:
        token_ids: the prediction, as the reply would spell it.
        after: for each pair of tokens, the indices that follow its occurrences, ascending.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        after: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, pair in enumerate(zip(self.token_ids, self.token_ids[1:], strict=False)):
            after[pair].append(index + 2)
        self.after: Mapping[tuple[int, int], Sequence[int]] = dict(after)


class PredictionDrafter:
    """Follows one reply along its predicted text.

    Args:
        predicted: the prediction.
        prompt_len: tokens before the reply.
    """

    name = "prediction"
    max_k = MAX_K
    free = True

    def __init__(self, predicted: PredictedText, prompt_len: int) -> None:
        self._ids = predicted.token_ids
        self._after = predicted.after
        self._prompt_len = prompt_len
        self._read = prompt_len  # tokens that the place accounts for
        self._at = 0  # index of the predicted token that is due; the length at the end
        self._missed = 0  # tokens since the reply left the prediction, 0 while they agree

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that the prediction says come next.

        Args:
            token_ids: prompt and reply; between calls it only grows at its end.
            k: tokens wanted.
        """
        for end in range(self._read + 1, len(token_ids) + 1):
            self._follow(token_ids, end)
        self._read = len(token_ids)
        # Lost for longer than a replaced token: wait for a match rather than guess.
        return self._ids[self._at : self._at + k] if self._missed <= 1 and k > 0 else []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing: what was committed is read by the next call."""

    def release(self) -> None:
        """Forget the sequence."""
        self._read, self._at, self._missed = self._prompt_len, 0, 0

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Move the place past token `end` - 1."""
        if self._missed <= 1 and self._at < len(self._ids):
            self._at += 1
            if self._ids[self._at - 1] == token_ids[end - 1]:
                self._missed = 0
                return
            self._at -= self._missed  # a second miss: the place is where the replacement ended
        found = self._best(token_ids, end)
        self._missed = 0 if found else self._missed + 1
        self._at = found or self._at

    def _best(self, token_ids: Sequence[int], end: int) -> int:
        """Return the index after the best occurrence of what the reply ends in, 0 without one."""
        places: Sequence[int] = ()
        longest = min(LONGEST, end - self._prompt_len)
        if longest > 1:
            places = self._after.get((token_ids[end - 2], token_ids[end - 1]), ())
            middle = bisect_left(places, self._at)
            places = places[max(middle - MAX_OCCURRENCES, 0) : middle + MAX_OCCURRENCES]

        def rank(index: int) -> tuple[int, int, bool]:
            length = 1
            while length < min(longest, index):
                if self._ids[index - length - 1] != token_ids[end - length - 1]:
                    break
                length += 1
            return length, -abs(index - self._at), index >= self._at

        return max(places or self._near(token_ids[end - 1]), key=rank, default=0)

    def _near(self, token_id: int) -> list[int]:
        """Return the indices after a token's occurrences close to the place."""
        low = max(self._at - NEAR, 0)
        near = self._ids[low : self._at + NEAR]
        return [low + place + 1 for place, own in enumerate(near) if own == token_id]
