"""The assistant: multi-token prediction from the target's own hidden states and KV.

The head (models/assistant.py) is shared by all sequences and drafts for all of them in one call.
It owns no KV and keeps nothing from round to round, so a sequence may sit out any number of rounds.
All that it needs of the past are features of the row that chose the anchor, which the target's last
step still has: where it has not, the head declines the round, and the next step brings them back.

Drafts are picked with the target's own noise (Daliri, Musco and Suresh 2024, arXiv 2408.07978), so
where both distributions agree, so do draft and choice, at any temperature.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from slipstream.drafters.base import Ask
from slipstream.kernels.ops import DraftRows, DraftStep, Step, page_table

NAME = "assistant"

_log = logging.getLogger(__name__)


class AssistantHead:
    """Drafts for all sequences of a target.

    Args:
        step: the compiled draft.
        target: the step whose kept values it reads.
        max_k: the most tokens that it was made to draft in a round.
        max_rows: sequences of one call of `step`.
        max_len: positions that the target's tables know.

    Attributes:
        declined: asks that it offered nothing for, by reason.
    """

    def __init__(
        self,
        step: DraftStep,
        target: Step,
        *,
        max_k: int,
        max_rows: int,
        max_len: int,
    ) -> None:
        self._step, self._target = step, target
        self._max_rows, self._max_len = max_rows, max_len
        self.max_k = max_k
        self.chunk = 0  # the target's KV is always there
        self.declined: Counter[str] = Counter()

    def drafter(self, *, shares: bool = True) -> AssistantDrafter:
        """Return the drafter of one request; it reads nothing, so nothing is shared."""
        return AssistantDrafter(self)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Return at most k tokens for each ask, none for one that it declines."""
        proposals: list[list[int]] = [[] for _ in asks]
        ready = [(index, ask, k) for index, ask in enumerate(asks) if (k := self._fitting(ask))]
        for first in range(0, len(ready), self._max_rows):
            some = ready[first : first + self._max_rows]
            widest = max([k for _, _, k in some])
            drafted = self._step(draft_rows([ask for _, ask, _ in some], widest)).tolist()
            for (index, _, k), tokens in zip(some, drafted, strict=True):
                proposals[index] = tokens[:k]
        return proposals

    def _fitting(self, ask: Ask) -> int:
        """Return how many tokens can be drafted, 0 to decline."""
        position = len(ask.token_ids) - 1
        chosen = ask.chosen
        if chosen is None or chosen.run != self._target.runs or chosen.position != position:
            return self._decline("the target's last step did not choose the anchor")
        if position < 1:
            return self._decline("there is no token before the anchor")
        k = min(ask.k, self.room(len(ask.token_ids)))
        return k if k > 0 else self._decline("the context is full")

    def room(self, num_tokens: int) -> int:
        """Return the most tokens that can be drafted behind so many."""
        # A draft's last token is not embedded, so it may lie one beyond the tables.
        return max(0, min(self.max_k, self._max_len - num_tokens + 1))

    def _decline(self, reason: str) -> int:
        self.declined[reason] += 1
        _log.debug("the assistant declines: %s", reason)
        return 0


class AssistantDrafter:
    """One request's share of a head: it has no state of its own.

    Attributes:
        head: what proposes for it.
    """

    name = NAME
    free = False
    num_read = 0

    def __init__(self, head: AssistantHead) -> None:
        self.head = head
        self.max_k = head.max_k

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return nothing: without the target's state there is nothing to draft from."""
        return []

    def behind(self, token_ids: Sequence[int]) -> int:
        """Return 0: what it reads is the target's own."""
        return 0

    def room(self, num_tokens: int) -> int:
        """Return the most tokens that it can draft behind so many."""
        return self.head.room(num_tokens)

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing."""

    def release(self) -> None:
        """Forget nothing."""


def draft_rows(asks: Sequence[Ask], k: int) -> DraftRows:
    """Lay asks out as rows; each has been `chosen` in the target's last step.

    Args:
        k: tokens to draft for every one of them.
    """
    chosen = [ask.chosen for ask in asks if ask.chosen is not None]
    tokens, rows, positions = np.array(
        [[ask.token_ids[-1] for ask in asks], *zip(*[c[1:] for c in chosen], strict=True)], np.int32
    )
    return DraftRows(
        token_ids=tokens,
        positions=positions,
        page_table=page_table([ask.pages for ask in asks]),
        kept_rows=rows,
        k=k,
        temperatures=np.array([ask.temperature for ask in asks], np.float32),
        seeds=np.array([ask.seed for ask in asks], np.uint64),
        choices=np.array([ask.choice for ask in asks], np.uint32),
    )
