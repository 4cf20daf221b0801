"""Scores proposals that were not verified against what is emitted anyway.

While k = 0, an engine hands over what the drafter proposes and then what each classic step emits;
out come the (position, hit) pairs of `RoundOutcome.scores`. A proposal is followed until it is
wrong or used up, so several may be followed at once, one token apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import MAX_K

# Proposals that are followed at once: one a step, each at most that long.
MAX_LIVE = MAX_K


class Scoring:
    """Proposals of one request that still agree with its text.

    Attributes:
        live: proposals that are followed, and how many of their tokens were right so far.
    """

    def __init__(self) -> None:
        self.live: list[tuple[Sequence[int], int]] = []

    def propose(self, token_ids: Sequence[int]) -> None:
        """Follow a proposal whose first token stands for the next one to be emitted."""
        if token_ids:
            self.live = [*self.live[1 - MAX_LIVE :], (token_ids, 0)]

    def emitted(self, token_ids: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """Return the scores that a round's tokens give, and drop what is wrong or used up.

        Example: after [5, 6] was proposed, emitting [5] gives ((1, True),), then [9] gives
        ((2, False),).
        """
        if not self.live:
            return ()
        scores: list[tuple[int, bool]] = []
        for token_id in token_ids:
            live: list[tuple[Sequence[int], int]] = []
            for proposal, right in self.live:
                hit = proposal[right] == token_id
                scores.append((right + 1, hit))
                if hit and right + 1 < len(proposal):
                    live.append((proposal, right + 1))
            self.live = live
        return tuple(scores)

    def clear(self) -> None:
        """Let go of all proposals, as when a round verifies its drafts."""
        self.live = []
