"""The drafter interface: something that proposes the tokens a round verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes continuations of one sequence. Proposals affect the clock, never the text."""

    name: str
    max_k: int

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that may follow `token_ids` (prompt and output, anchor last).

        An empty list means that the drafter has nothing to offer now.
        """

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Take in how much of a proposal was accepted."""

    def release(self) -> None:
        """Forget the sequence."""
