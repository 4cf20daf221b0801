"""The drafter interface: something that proposes the tokens a round verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slipstream.kernels.ops import Int32


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


class Chosen(NamedTuple):
    """Where the target chose an anchor.

    Attributes:
        run: the target's step, counted as `Step.runs`.
        row: the row of that step.
        position: the anchor's position in its sequence.
    """

    run: int
    row: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a head is asked for one sequence.

    Attributes:
        drafter: the request's own share of the head.
        token_ids: prompt and output, anchor last.
        k: tokens wanted, >= 1.
        pages: the sequence's KV pages, int32 of shape (P,).
        chosen: where the target chose the anchor, None where that is not known.
        temperature, top_k, top_p, min_p, seed, choice: how the target samples.
    """

    drafter: BatchDrafter
    token_ids: Sequence[int]
    k: int
    pages: Int32
    chosen: Chosen | None
    temperature: float
    seed: int
    choice: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Head(Protocol):
    """What the drafters of all sequences share where they draft in one call.

    Attributes:
        max_k: the most tokens that it drafts in a round.
        chunk: tokens that one call reads to catch up, 0 where there is nothing to catch up with.
        declined: asks that it offered nothing for, by reason.
    """

    max_k: int
    chunk: int
    declined: Counter[str]

    def drafter(self, *, shares: bool = True) -> BatchDrafter:
        """Return the drafter of one request.

        Args:
            shares: False has it read everything itself and leave nothing to others, where a drafter
                that owns a KV would; for what is timed.
        """

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Return at most k tokens for each ask, none for one that it declines."""


class BatchDrafter(Drafter, Protocol):
    """A drafter whose proposals for a step are made together, by its head.

    Its own `propose` knows too little of the sequence and offers nothing.

    Attributes:
        num_read: tokens that it read because it was `behind`, so far.
    """

    num_read: int

    @property
    def head(self) -> Head:
        """What proposes for it."""

    def behind(self, token_ids: Sequence[int]) -> int:
        """Return the tokens that it has to read first, besides what every draft reads."""

    def room(self, num_tokens: int) -> int:
        """Return the most tokens that it can draft behind so many."""
