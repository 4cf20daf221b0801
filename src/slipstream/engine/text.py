"""The text of one reply as it grows: detokenized, and held back where a stop string may begin.

A stop string may straddle tokens, rounds and characters of several bytes. Ids are taken one by one
where there are stop strings, so where a reply ends does not depend on how rounds were cut. The text
ends before the stop string; the ids end with the token that completed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns ids into text as they come, holding back broken characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final."""

    def finish(self) -> str:
        """Return what was held back."""


class ReplyText:
    """Text that became final, piece by piece.

    Args:
        stops: strings that end the reply, none of them empty.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._pieces: list[str] = []
        self._held = ""

    def __str__(self) -> str:
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int], *, may_stop_after: int = 0) -> tuple[str, int | None]:
        """Take the next ids.

        Args:
            may_stop_after: a stop string that one of the first so many ids completes is plain text.

        Returns:
            The text that became final, and how many ids there are up to the one that completed a
            stop string, None if none did.
        """
        if not self._stops:
            return self._keep(self._detokenizer.push(token_ids)), None
        piece = ""
        for i, token_id in enumerate(token_ids):
            self._held += self._detokenizer.push([token_id])
            if i >= may_stop_after and (at := self._stop_at()) is not None:
                piece, self._held = piece + self._held[:at], ""
                return self._keep(piece), i + 1
            cut = len(self._held) - self._num_undecided()
            piece, self._held = piece + self._held[:cut], self._held[cut:]
        return self._keep(piece), None

    def finish(self) -> str:
        """Return what was held back; no more ids follow."""
        held, self._held = self._held, ""
        return self._keep(held + self._detokenizer.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _stop_at(self) -> int | None:
        """Return where the first stop string in the held text begins."""
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        return min(found, default=None)

    def _num_undecided(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
