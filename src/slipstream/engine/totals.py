"""What all decoding rounds of an engine came to, counted as they end.

Only sums are kept, and whoever reads them derives the rest: drafted and accepted tokens, by
position and by source, all follow from one table of outcomes. They are plain numbers, so that a
step that drafts nothing pays less than a microsecond for them, and so that another thread may read
them while steps run: see `copied`.

What classic steps would have taken for the same tokens is kept beside what steps took. A step
without drafts is worth what it took, less what drafters and the policy spent in it. One with drafts
is worth its anchors' classic step, or what its prompt rows take without drafts, and a share of a
classic step for each further token; where no classic step of such a batch was measured nothing is
claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from slipstream.policy.base import StepOutcome
from slipstream.types import MAX_K

if TYPE_CHECKING:
    from slipstream.engine.round import Round
    from slipstream.policy.round_cost import RoundCost

# Rounds whose widths a report shows as what happens now: a second or two of a small model.
RECENT = 512

Outcome = tuple[str, int, int]
Key = TypeVar("Key")
Value = TypeVar("Value")


def _seconds_by_k() -> list[float]:
    return [0.0] * (MAX_K + 1)


def _counts_by_k() -> list[int]:
    return [0] * (MAX_K + 1)


@dataclass(kw_only=True)
class RoundTotals:
    """Sums over decoding rounds; an index or key k is the drafted tokens of a round.

    Attributes:
        outcomes: rounds with k > 0 by (source, k, how many of the drafts were emitted).
        undrafted: rounds with k = 0 by cause, a key of `CAUSES`.
        timed, timed_s: rounds and their seconds by k, where a step read no prompt; a round lasts as
            long as its step, and one with k = 0 counts where nobody else drafted either.
        predicted, predicted_s: the same as the cost model had it before, k > 0 only.
        draft_s: seconds of drafting by source, whatever came of it.
        unused_draft_s: how much of it went into rounds that then drafted nothing.
        busy_s: seconds of all steps.
        decode_s, worth_s: seconds of steps with decoding rounds, and what classic steps would have
            taken for their tokens; steps whose worth is unknown are in neither.
        classic_step_s: a classic step of the batch that last drafted or was looked at, 0 for none.
        recent_k: the last rounds' k, the newest last.
    """

    outcomes: dict[Outcome, int] = field(default_factory=dict)
    undrafted: dict[str, int] = field(default_factory=dict)
    timed: list[int] = field(default_factory=_counts_by_k)
    timed_s: list[float] = field(default_factory=_seconds_by_k)
    predicted: list[int] = field(default_factory=_counts_by_k)
    predicted_s: list[float] = field(default_factory=_seconds_by_k)
    draft_s: dict[str, float] = field(default_factory=dict)
    unused_draft_s: float = 0.0
    busy_s: float = 0.0
    decode_s: float = 0.0
    worth_s: float = 0.0
    classic_step_s: float = 0.0
    recent_k: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count(self, batch: Sequence[Round], step_s: float, decided_s: float = 0.0) -> None:
        """Count a step: its rounds' outcomes, and its time where nobody drafted.

        Why a round drafted nothing is told its request as well.

        Args:
            decided_s: what the policy itself took of the step.
        """
        self.busy_s += step_s
        drafted = reads_prompt = False
        rounds = 0
        spent_s = decided_s
        for part in batch:
            if part.is_prefill:
                reads_prompt = True
                continue
            rounds += 1
            if part.peek_s or part.draft_s:
                spent_s += part.peek_s + part.draft_s
                self._spent(part)
            if part.drafts:
                drafted = True
                self._drafted(part)
            else:
                cause = _why_not(part)
                self.undrafted[cause] = self.undrafted.get(cause, 0) + 1
                own = part.request.stats.undrafted
                own[cause] = own.get(cause, 0) + 1
                self.recent_k.append(0)
        if not rounds:
            return
        if not drafted:
            self.decode_s += step_s
            self.worth_s += step_s - spent_s
        if reads_prompt:
            return
        if not drafted:
            self.timed[0] += rounds
            self.timed_s[0] += rounds * step_s
            return
        for part in batch:
            if part.drafts:
                self.timed[len(part.drafts)] += 1
                self.timed_s[len(part.drafts)] += step_s

    def weigh(self, step: StepOutcome, cost: RoundCost) -> None:
        """Count what a step was predicted to take and what its tokens are worth.

        Args:
            cost: what was measured before this step; a guess is never asked for.
        """
        rounds = step.rounds
        batch = len(rounds)
        own_kv = sum([part.context_len for part in rounds])
        classic_s = cost.classic.time_s(batch, own_kv)
        if classic_s is not None:
            self.classic_step_s = classic_s
        widths = [part.k for part in rounds]
        drafted = sum(widths)
        if not drafted:
            return
        riding, kv = step.prefill_rows, own_kv + step.prefill_kv
        paid = [part.k if part.paid else 0 for part in rounds]
        draft_s = cost.drafting.peek_s(batch) + cost.drafting.drafting_s(paid)
        round_s = cost.round_s(batch + drafted + riding, kv, draft_s)
        if round_s is not None and not riding:
            for k in widths:
                if k:
                    self.predicted[k] += 1
                    self.predicted_s[k] += round_s
        base_s = cost.base_s(batch, riding, kv) if riding else classic_s
        if base_s is not None and classic_s is not None:
            gained = sum([part.emitted for part in rounds]) - batch
            self.decode_s += step.round_s
            self.worth_s += base_s + gained * classic_s / batch

    def _spent(self, part: Round) -> None:
        """Count what a round's drafters took."""
        request = part.request
        for drafter, seconds in (
            (request.free_drafter, part.peek_s),
            (request.paid_drafter, part.draft_s),
        ):
            if seconds:
                source = request.drafter_name if drafter is None else drafter.name
                self.draft_s[source] = self.draft_s.get(source, 0.0) + seconds
                if not part.drafts:
                    self.unused_draft_s += seconds

    def _drafted(self, part: Round) -> None:
        k = len(part.drafts)
        outcome = (part.drafter_name, k, min(part.accepted, len(part.emitted)))
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.recent_k.append(k)


def copied(counts: Mapping[Key, Value]) -> dict[Key, Value]:
    """Return a copy of a table that another thread may be adding to.

    `dict` of a dict is a single operation of the interpreter, which a thread cannot come into; a
    loop over the table is many, and fails when a key is added in between.
    """
    return dict(counts)


def accepted_by_position(outcomes: Mapping[Outcome, int]) -> tuple[list[int], list[int]]:
    """Return how many drafts were verified and how many emitted, by position from 0.

    Example: one round of k = 3 with 1 accepted is [1, 1, 1] and [1, 0, 0].
    """
    drafted, accepted = [0] * MAX_K, [0] * MAX_K
    for (_, k, num_accepted), count in outcomes.items():
        for position in range(k):
            drafted[position] += count
        for position in range(num_accepted):
            accepted[position] += count
    return drafted, accepted


def by_source(outcomes: Mapping[Outcome, int]) -> dict[str, tuple[int, int]]:
    """Return the drafts that were verified and emitted, by source."""
    sources: dict[str, tuple[int, int]] = {}
    for (source, k, accepted), count in outcomes.items():
        before = sources.get(source, (0, 0))
        sources[source] = (before[0] + count * k, before[1] + count * accepted)
    return sources


def _why_not(part: Round) -> str:
    """Return why a round drafted nothing."""
    request = part.request
    if request.fixed_k == 0 or (request.free_drafter is None and request.paid_drafter is None):
        return "failed" if request.drafter_failure else "off"
    return part.cause
