"""A draft model: a small model of the target's vocabulary that writes ahead of it.

This is speculative decoding as it began (Leviathan, Kalman and Matias 2023, arXiv 2211.17192; Chen
et al. 2023, arXiv 2302.01318). The model has weights, KV pages and a compiled step of its own, on
the target's back end; its forwards are those of any target, so its drafts depend neither on
batch-mates nor on k.

It owns state, so it can fall behind: a prompt is not read before somebody asks for drafts, and what
other drafters or classic steps emit passes it by. What it has not seen comes first, many rows in
one forward, and is a part of what drafting costs then. One call reads one chunk at most, so that
a long prompt holds up nobody; a sequence that is not there yet offers nothing and goes on reading
the next time.

Text that another sequence has read is not read again: full pages of it are shared, by the ids that
they hold, as the target's are. Of sequences that would read the same page in one call one does, and
the others take it over in the next.

Rejected drafts need no rollback: their KV lies beyond the length that counts and is written again.

Drafts are picked as the target picks, with its own noise, temperature and cuts (Daliri, Musco and
Suresh 2024, arXiv 2408.07978): where both distributions agree, so do draft and choice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.drafters.base import Ask
from slipstream.kernels.ops import (
    F32,
    PAGE_SIZE,
    Int32,
    Picks,
    Rows,
    Step,
    StepResult,
    page_table,
)
from slipstream.types import MAX_K

NAME = "draft_model"
# Rows of a draft's first forward that every sequence has: the anchor, and the draft before it that
# was accepted and never fed back.
ORDINARY_ROWS = 2

Pick = Callable[[F32, Ask, int], int]  # the token of a row at a position, below 0 for none

_log = logging.getLogger(__name__)


class Held(Protocol):
    """The pages of one sequence in the draft model's KV, as `engine.pages.HeldPages`."""

    table: Int32

    def missing(self, num_positions: int) -> int:
        """Return how many more pages so many positions need."""

    def reserve(self, num_positions: int) -> None:
        """Take those pages."""

    def next_prefix(self, token_ids: Sequence[int], limit: int) -> Hashable:
        """Return what tells the next page to publish or adopt apart, None where there is none."""

    def adopt(self, token_ids: Sequence[int], limit: int) -> int:
        """Take over pages that others have read; return the positions that are published now."""

    def publish(self, token_ids: Sequence[int], limit: int) -> None:
        """Let others have pages that are full and final."""

    def release(self) -> None:
        """Give all pages back."""


class Pages(Protocol):
    """The pages of the draft model's KV."""

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""

    def hold(self, *, shares: bool = True) -> Held:
        """Return the pages of a new sequence, none yet."""


@dataclass(frozen=True)
class _Draft:
    """One sequence of a call.

    Attributes:
        index: its place in the call.
        tokens: what was drafted so far.
    """

    index: int
    ask: Ask
    k: int
    own: DraftModelDrafter
    tokens: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where its next token goes."""
        return len(self.ask.token_ids) + len(self.tokens)


class DraftModel:
    """Drafts for all sequences of a target.

    Args:
        step: its compiled forward, of `chunk` rows and `ORDINARY_ROWS` for each sequence.
        pages: of its KV.
        pick: chooses a token of a row as the request's sampler would, without its penalties; a step
            that samples does so itself.
        vocab_size: ids that both models know are below it.
        max_len: positions that it knows.
        max_seqs: sequences that may ask at once.
        chunk: tokens that one call reads to catch up, of all sequences together.

    Attributes:
        max_k: the most tokens that it drafts in a round.
        declined: asks that it offered nothing for, by reason.
    """

    def __init__(
        self,
        step: Step,
        pages: Pages,
        *,
        pick: Pick,
        vocab_size: int,
        max_len: int,
        max_seqs: int,
        chunk: int,
    ) -> None:
        self._step, self.pages, self._pick = step, pages, pick
        self._samples: bool = getattr(step, "samples", False)
        self.vocab_size, self.max_len = vocab_size, max_len
        self._max_seqs, self.chunk = max_seqs, chunk
        self.max_k = MAX_K
        self.declined: Counter[str] = Counter()

    def drafter(self, *, shares: bool = True) -> DraftModelDrafter:
        """Return the drafter of one request."""
        return DraftModelDrafter(self, self.pages.hold(shares=shares))

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Return at most k tokens for each ask, none for one that it declines."""
        proposals: list[list[int]] = [[] for _ in asks]
        for first in range(0, len(asks), self._max_seqs):
            some = asks[first : first + self._max_seqs]
            for draft in self._draft(self._ready(some)):
                proposals[first + draft.index] = draft.tokens
        return proposals

    def _ready(self, asks: Sequence[Ask]) -> list[_Draft]:
        """Return the asks that can be met, their pages reserved."""
        ready = []
        coming: set[Hashable] = set()
        for index, ask in enumerate(asks):
            own = ask.drafter
            assert isinstance(own, DraftModelDrafter), "an ask comes from a drafter of this head"
            own.settle(ask.token_ids)
            k = min(ask.k, self.max_k, own.room(len(ask.token_ids)))
            if own.refuses(ask.token_ids):
                self._decline("a token of the text is not in the draft model's vocabulary")
            elif k < 1:
                self._decline("the draft model's context is full")
            elif (page := own.whole_page(ask.token_ids)) is not None and page in coming:
                self._decline("the draft model is still reading")
            elif not own.reserve(len(ask.token_ids) - 1 + k):
                self._decline("no KV page is left for the draft model")
            else:
                ready.append(_Draft(index, ask, k, own))
                coming.add(page)
        return ready

    def _draft(self, drafts: list[_Draft]) -> list[_Draft]:
        """Draft for sequences whose pages are reserved; return those that got anything."""
        drafting = there = self._read(drafts)
        while drafting := [draft for draft in drafting if len(draft.tokens) < draft.k]:
            fed = [(draft, draft.own.feed(), draft.tokens[-1:]) for draft in drafting]
            drafting = self._pick_all(drafting, self._run(fed, drafting))
        return there

    def _read(self, drafts: list[_Draft]) -> list[_Draft]:
        """Read what sequences have not seen, as far as one chunk goes.

        Returns:
            Those that are there, with their first token.
        """
        left = self.chunk
        parts: list[_Part] = []
        there = []
        for draft in drafts:
            token_ids = draft.ask.token_ids
            start = min(draft.own.kv_len, len(token_ids) - 1)
            behind = max(0, len(token_ids) - start - ORDINARY_ROWS)
            end = len(token_ids) if behind <= left else start + left
            if end < len(token_ids):
                self._decline("the draft model is still reading")
            else:
                there.append(draft)
            draft.own.num_read += min(behind, left)
            left -= min(behind, left)
            if end > start:
                parts.append((draft, start, token_ids[start:end]))
                draft.own.read(end)
        if not parts:
            return []
        there = self._pick_all(there, self._run(parts, there))
        for draft, _, _ in parts:
            draft.own.publish(draft.ask.token_ids)
        return there

    def _run(self, parts: Sequence[_Part], wanted: Sequence[_Draft]) -> StepResult:
        """Run the model over some tokens of some sequences.

        Args:
            wanted: those whose last rows' logits are wanted, in the order of `parts`.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        logit_rows: list[int] = []
        indices = {draft.index for draft in wanted}
        for number, (draft, start, tokens) in enumerate(parts):
            token_ids += tokens
            positions += range(start, start + len(tokens))
            sequences += [number] * len(tokens)
            if draft.index in indices:
                logit_rows.append(len(token_ids) - 1)
        rows = np.array([token_ids, positions, sequences], np.int32)
        return self._step(
            Rows(
                token_ids=rows[0],
                positions=rows[1],
                sequences=rows[2],
                page_table=page_table([draft.own.pages for draft, _, _ in parts]),
                logit_rows=np.array(logit_rows, np.int32),
                picks=_picks(wanted) if self._samples else None,
            )
        )

    def _pick_all(self, drafts: list[_Draft], result: StepResult) -> list[_Draft]:
        """Choose the next token of each sequence; return those that have one."""
        picked = []
        for row, draft in enumerate(drafts):
            ask, token = draft.ask, int(result.argmax[row])
            is_padding = token >= self.vocab_size  # a row of the embedding that means nothing
            if ask.temperature > 0.0 and (is_padding or not self._samples):
                known = result.logits[row, : self.vocab_size]
                token = self._pick(known, ask, draft.position)
            elif is_padding:
                token = int(result.logits[row, : self.vocab_size].argmax())
            if token >= 0:
                draft.tokens.append(token)
                draft.own.drafted.append(token)
                picked.append(draft)
        return picked

    def _decline(self, reason: str) -> None:
        self.declined[reason] += 1
        _log.debug("the draft model declines: %s", reason)


def _picks(drafts: Sequence[_Draft]) -> Picks | None:
    """Return how a step chooses the next tokens, None where all are the largest logits."""
    asks = [draft.ask for draft in drafts]
    if not any([ask.temperature for ask in asks]):  # noqa: C419 - in every draft step
        return None
    return Picks(
        temperatures=np.array([ask.temperature for ask in asks], np.float32),
        top_k=np.array([ask.top_k for ask in asks], np.int32),
        top_p=np.array([ask.top_p for ask in asks], np.float64),
        min_p=np.array([ask.min_p for ask in asks], np.float64),
        seeds=np.array([ask.seed for ask in asks], np.uint64),
        choices=np.array([ask.choice for ask in asks], np.uint32),
        positions=np.array([draft.position for draft in drafts], np.uint32),
    )


_Part = tuple[_Draft, int, Sequence[int]]  # whose tokens, from which position


class DraftModelDrafter:
    """One request's share of a draft model: what of the text its KV holds, and in which pages.

    Attributes:
        head: what proposes for it.
        num_read: tokens that it read because it was `behind`, so far.
        kv_len: positions whose KV is that of the text.
        drafted: tokens that were drafted behind the text as it was then; the KV of those before the
            last lies behind `kv_len`.
    """

    name = NAME
    free = False

    def __init__(self, head: DraftModel, held: Held) -> None:
        self.head = head
        self.max_k = head.max_k
        self.kv_len = self.num_read = 0
        self.drafted: list[int] = []
        self._held = held
        self._num_known = 0  # tokens of the text that are in the model's vocabulary
        self._is_foreign = False

    @property
    def pages(self) -> Int32:
        """Pages in order of position, int32 of shape (P,)."""
        return self._held.table

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return nothing: drafts of a step are made together, by the head."""
        return []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing: what was kept is seen in the text."""

    def release(self) -> None:
        """Give all pages back and forget the sequence. Safe to call twice."""
        self.kv_len = self._num_known = 0
        self.drafted, self._is_foreign = [], False
        self._held.release()

    def behind(self, token_ids: Sequence[int]) -> int:
        """Return the tokens that it has to read first, besides what every draft reads.

        Those in pages that others have read are not among them.
        """
        self.settle(token_ids)
        return max(0, len(token_ids) - self.kv_len - ORDINARY_ROWS)

    def room(self, num_tokens: int) -> int:
        """Return the tokens that it can draft behind so many, 0 where it never will again."""
        # The last draft is not fed, so it may lie one beyond the tables.
        return 0 if self._is_foreign else max(0, self.head.max_len - num_tokens + 1)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Keep the KV of drafts that have become text; let go of it from the first that has not.

        That of the anchor does not count: its logits are wanted, so it is read once more. Behind
        what is kept, pages that others have read are taken over.
        """
        drafted, anchor = self.drafted, len(token_ids) - 1
        while drafted and self.kv_len <= anchor:
            if drafted[0] != token_ids[self.kv_len]:
                drafted.clear()
            elif len(drafted) == 1 or self.kv_len == anchor:
                break
            else:
                del drafted[0]
                self.kv_len += 1
        self.publish(token_ids)
        if not drafted:
            self.kv_len = max(self.kv_len, self._held.adopt(token_ids, anchor))

    def publish(self, token_ids: Sequence[int]) -> None:
        """Let others have the pages that are full of text; that of the anchor is written again."""
        self._held.publish(token_ids, min(self.kv_len, len(token_ids) - 1))

    def whole_page(self, token_ids: Sequence[int]) -> Hashable:
        """Return what tells apart the page that it would read first, None if it is not a whole."""
        if self.drafted or self.kv_len % PAGE_SIZE:
            return None
        return self._held.next_prefix(token_ids, len(token_ids) - 1)

    def refuses(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the text has an id that the model has no embedding for."""
        if not self._is_foreign and self._num_known < len(token_ids):
            self._is_foreign = max(token_ids[self._num_known :]) >= self.head.vocab_size
            self._num_known = len(token_ids)
        return self._is_foreign

    def reserve(self, num_positions: int) -> bool:
        """Take the pages that so many positions need; False, and none is taken, if they lack."""
        if self._held.missing(num_positions) > self.head.pages.num_free:
            return False
        self._held.reserve(num_positions)
        return True

    def read(self, end: int) -> None:
        """Note that a forward writes the KV of the text up to a position."""
        self.kv_len = end
        self.drafted = []

    def feed(self) -> int:
        """Return where a forward writes the KV of the last draft."""
        return self.kv_len + len(self.drafted) - 1
