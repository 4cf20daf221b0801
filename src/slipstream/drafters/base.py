"""The drafter interface: something that proposes the tokens a round verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes continuations of one sequence. Proposals affect the clock, never the text.

    Attributes:
        name: what reports call it.
        max_k: the most tokens it can propose.
        free: proposing costs next to nothing, so the engine may ask before the policy decides.
    """

    name: str
    max_k: int
    free: bool

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that may follow `token_ids` (prompt and output, anchor last).

        An empty list means that the drafter has nothing to offer now. A free drafter's proposal for
        a smaller k is a prefix of the one for a larger k.
        """

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Take in how much of a proposal was accepted."""

    def release(self) -> None:
        """Forget the sequence."""
