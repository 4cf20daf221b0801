"""The policy interface: a pure decision, one hook that observes.

A policy decides how many tokens a round drafts. It sees only what a view holds, never the engine;
`choose` changes nothing and `observe` is the only mutation, so any recorded run can be replayed
through any policy.

Views and outcomes are made in every round, and frozen ones take three times as long to make: that
nobody changes them is a convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slipstream.types import Verdict


@dataclass(slots=True, kw_only=True)
class RoundView:
    """What is known before a round.

    Attributes:
        remaining: tokens that the request may still emit, >= 1.
        context_len: positions already in the target's KV, anchor excluded.
        proposed: drafted tokens that a free drafter offers now; 0 for none.
        ceiling: largest k that context and request allow, whichever drafter it is.
        paid_ceiling: largest k of the paid drafter, 0 for none; None for the ceiling.
        request: which request it is; state is kept under it until the policy forgets it.
        fixed_k: what the request drafts whatever the policy thinks, as far as it fits; 0 where it
            is not to draft, None where the policy decides.
        behind: tokens that the paid drafter has to read before it can draft, besides what every
            draft reads.
    """

    remaining: int
    context_len: int
    proposed: int
    ceiling: int
    paid_ceiling: int | None = None
    request: int = 0
    fixed_k: int | None = None
    behind: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many tokens to draft, by which drafter, and why.

    Attributes:
        k: tokens to draft and verify.
        reason: never empty.
        paid: the paid drafter drafts them; else they are what the free one offers.
        shadow: tokens that a paid drafter drafts beside a classic step, to be scored against what
            is emitted and never verified; 0 if k > 0.
    """

    k: int
    reason: str
    paid: bool = False
    shadow: int = 0


@dataclass(slots=True, kw_only=True)
class RoundOutcome:
    """What a round did.

    Attributes:
        k: tokens drafted and verified; 0 for a classic step.
        paid: the paid drafter drafted them.
        accepted: length of the accepted prefix, before any cut.
        emitted: tokens that the request gained; less than accepted + 1 where a stop or a limit cut
            the round.
        draft_s, verify_s, round_s: seconds; round_s runs from round start to round start.
        request: as in the view.
        context_len: as in the view, before the round.
        shadow: tokens drafted beside a classic step, not verified.
        scores: (position, hit) of every proposal of the free drafter that is not verified but
            still agrees with all that was emitted since it was made: which of its tokens, from 1,
            an emitted token was compared with, and whether they agree.
        shadow_scores: the same of the paid drafter's shadows.
        fixed: k was not the policy's choice: it is learned from, and no budget pays for it.
        caught_up: tokens that the paid drafter read in this step because it was behind.
    """

    k: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    round_s: float
    request: int = 0
    context_len: int = 0
    shadow: int = 0
    scores: tuple[tuple[int, bool], ...] = ()
    shadow_scores: tuple[tuple[int, bool], ...] = ()
    fixed: bool = False
    paid: bool = False
    caught_up: int = 0


@dataclass(slots=True, kw_only=True)
class StepView:
    """What is known before a step, in which several rounds share one forward.

    Attributes:
        rounds: the decoding rounds.
        prefill_rows: rows that chunks of prompts take in the same forward.
        prefill_kv: KV positions that those chunks read.
        max_draft_rows: drafted rows that the forward has room for, beside those of fixed widths;
            None for no limit.
        fixed_drafts: which of the fixed widths the paid drafter drafts; the policy fills it in.
        fixed_behind: tokens that it has to read for them first; likewise.
    """

    rounds: Sequence[RoundView]
    prefill_rows: int = 0
    prefill_kv: int = 0
    max_draft_rows: int | None = None
    fixed_drafts: Sequence[int] = ()
    fixed_behind: int = 0

    @property
    def riding_rows(self) -> int:
        """Rows that the step has besides anchors and drafts that the policy chooses."""
        return self.prefill_rows + sum([part.fixed_k or 0 for part in self.rounds])


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What a step did; the times are the step's, those of its rounds are not read.

    Attributes:
        rounds: one outcome for each decoding round.
        draft_s, verify_s, round_s: seconds; draft_s adds up all that the paid drafter took.
        peek_s: seconds that free drafters took.
        choose_s: seconds that the policy took for its choice.
        observe_s: the same for taking in the step before, which are part of this one.
        prefill_rows, prefill_kv: as in the view.
    """

    rounds: Sequence[RoundOutcome]
    draft_s: float
    verify_s: float
    round_s: float
    peek_s: float = 0.0
    choose_s: float = 0.0
    observe_s: float = 0.0
    prefill_rows: int = 0
    prefill_kv: int = 0

    @property
    def spent_s(self) -> float:
        """Seconds that an engine which never drafts would not have spent, the verify excepted."""
        return self.draft_s + self.peek_s + self.choose_s + self.observe_s

    @property
    def fixed_drafts(self) -> list[int]:
        """As in the view."""
        return [part.k for part in self.rounds if part.fixed and part.paid]

    @property
    def caught_up(self) -> int:
        """Tokens that the paid drafter read because it was behind, for all rounds."""
        return sum([part.caught_up for part in self.rounds])

    @property
    def fixed_caught_up(self) -> int:
        """The same for fixed widths."""
        return sum([part.caught_up for part in self.rounds if part.fixed])

    @property
    def riding_rows(self) -> int:
        """As in the view."""
        return self.prefill_rows + sum([part.k for part in self.rounds if part.fixed])


class Expected(NamedTuple):
    """What was expected of a step before anything was learned from it; None where it is unknown.

    Attributes:
        classic_s: a classic step of the same sequences.
        base_s: the same with the prompt rows that the step had.
        round_s: the step itself, None if it did not draft.
    """

    classic_s: float | None
    base_s: float | None
    round_s: float | None


class Policy(Protocol):
    """Sizes rounds.

    Attributes:
        mode: "auto", "off" or "fixed:K", as it was asked for.
        verdict, reason: what it decided over all and why; `reason` is never empty.
        predicted_speedup: S of what it decided on, None where it does not say.
    """

    @property
    def mode(self) -> str: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def reason(self) -> str: ...

    @property
    def predicted_speedup(self) -> float | None: ...

    def choose(self, view: RoundView) -> Decision:
        """Return the next round's k in [0, view.ceiling]. Pure."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in what a round did."""
