"""What will be run: prompts in groups, and the limits of a run.

Groups of all categories and batches take turns, so that a run that ends early has something of
each. Groups of several prompts ask first turns only: later turns would need conversations of equal
length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist

from slipstream.bench.workload import Conversation, Workload


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a run does at most.

    Attributes:
        max_tokens: of each reply.
        prompts: conversations of each category.
        batches: how many prompts are answered side by side.
        seconds: no new group is begun after this, counted from before the model is loaded.
        precision: half width of each category's interval that is wanted, as a share.
    """

    max_tokens: int
    prompts: int
    batches: tuple[int, ...]
    seconds: float
    precision: float


DEFAULT = Limits(max_tokens=128, prompts=8, batches=(1, 4), seconds=570.0, precision=0.25)
QUICK = Limits(max_tokens=48, prompts=4, batches=(1,), seconds=52.0, precision=1.0)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Prompts that are answered side by side.

    Attributes:
        turn: which turn of the conversations is asked.
    """

    category: str
    conversations: tuple[Conversation, ...]
    turn: int

    @property
    def batch(self) -> int:
        """Prompts side by side."""
        return len(self.conversations)

    @property
    def name(self) -> str:
        """What messages call it."""
        ids = ", ".join(conversation.id for conversation in self.conversations)
        return f"{self.category} {ids}" + (f", turn {self.turn + 1}" if self.turn else "")


def groups_of(workload: Workload, batches: Sequence[int]) -> list[Group]:
    """Return the groups in the order in which they are run."""
    lists = []
    for batch in batches:
        columns = [
            _groups_of(category, conversations, batch)
            for category, conversations in workload.categories.items()
        ]
        lists.append([group for row in zip_longest(*columns) for group in row if group is not None])
    return _in_turn(lists)


def left_over(workload: Workload, batches: Sequence[int]) -> list[str]:
    """Return, in words, which prompts fill no group."""
    notes = []
    for batch in batches:
        for category, own in workload.categories.items():
            spare = len(own) % batch
            if spare:
                notes.append(f"batch {batch}: the last {spare} prompts of {category} fill no group")
    return notes


def tokens_needed(precision: float) -> int:
    """Return the tokens that an interval of a half width takes at least; 0.05 takes 1,537.

    What a round emits is one token or several, spread about as widely as its mean; the mean of n
    rounds is then known to 1.96 / sqrt(n), and there are no more rounds than tokens.
    """
    return math.ceil((NormalDist().inv_cdf(0.975) / precision) ** 2)


def _groups_of(category: str, conversations: Sequence[Conversation], batch: int) -> list[Group]:
    if batch == 1:
        return [
            Group(category=category, conversations=(conversation,), turn=turn)
            for conversation in conversations
            for turn in range(len(conversation.turns))
        ]
    return [
        Group(category=category, conversations=tuple(conversations[start : start + batch]), turn=0)
        for start in range(0, len(conversations) - batch + 1, batch)
    ]


def _in_turn(lists: Sequence[list[Group]]) -> list[Group]:
    """Return the lists merged, each evenly spread over the whole."""
    placed = [
        ((place + 0.5) / len(groups), number, group)
        for number, groups in enumerate(lists)
        for place, group in enumerate(groups)
    ]
    return [group for *_, group in sorted(placed, key=lambda item: item[:2])]
