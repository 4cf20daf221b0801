"""One request's part in a step, and how parts are packed into the rows of one forward.

While a prompt is prefilled, the part is a chunk of it; after that it is a round: the anchor and k
drafts. Both are the same to a forward, which is why they can share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.config import EngineConfig
from slipstream.drafters.base import Chosen, Drafter
from slipstream.drafters.combined import source_of
from slipstream.engine.request import Request
from slipstream.engine.sampling import PickSettings, TokenLogprobs
from slipstream.kernels.ops import F32, Picks, Rows, page_table
from slipstream.policy.base import RoundOutcome, RoundView

PADDING_POSITION = -1
ARGMAX = PickSettings(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0)


@dataclass(kw_only=True, eq=False, slots=True)
class Round:
    """What one step does for one request; filled in from top to bottom.

    Attributes:
        input_ids: committed tokens whose KV is still to be written: a chunk, or the anchor.
        is_prefill: the request has no token yet.
        is_last: `input_ids` reach the end of the committed tokens, so logits are wanted.
        context_len: positions whose KV is there already.
        ceiling: largest k that fits: the bonus token always comes on top, within what remains.
        proposed: what the free drafter offers.
        k: what the policy chose.
        paid: whether the paid drafter drafts them.
        shadow: tokens that the paid drafter drafts to be scored only.
        cause: why k is 0, as far as it was said; a key of `causes.CAUSES`.
        drafted: what the paid drafter drafts.
        caught_up: tokens that it read because it was behind.
        drafts: what is verified, at most k tokens.
        first_row, run: where it is in a forward, and which run of the target's step that was.
        logits: raw logits after the last input and after each draft, float32 of shape (k + 1, V);
            gone with the next forward. Empty where the request reads none.
        target_ids: their argmax, or what the step picked.
        accepted: length of the accepted prefix of `drafts`.
        emitted: the tokens that the request gains.
        text: the text that becomes final with them.
        logprobs: their log-probabilities, if the request reports them.
        peek_s, draft_s, verify_s: seconds of lookups, of the paid drafter, of the step's forward.
    """

    request: Request
    input_ids: list[int]
    is_prefill: bool
    is_last: bool
    context_len: int = 0
    ceiling: int = 0
    proposed: list[int] = field(default_factory=list)
    k: int = 0
    paid: bool = False
    shadow: int = 0
    cause: str = "nothing_offered"
    drafted: list[int] = field(default_factory=list)
    caught_up: int = 0
    drafts: list[int] = field(default_factory=list)
    first_row: int = 0
    run: int = 0
    logits: F32 | tuple[()] = ()
    target_ids: list[int] = field(default_factory=list)
    accepted: int = 0
    emitted: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    peek_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @classmethod
    def next_of(cls, request: Request, chunk: int) -> Round:
        """Return the request's next part, at most `chunk` committed tokens of it."""
        sequence = request.sequence
        end = min(sequence.kv_len + chunk, len(sequence.token_ids))
        is_prefill = sequence.num_generated == 0
        return cls(
            request=request,
            input_ids=sequence.token_ids[sequence.kv_len : end],
            is_prefill=is_prefill,
            is_last=end == len(sequence.token_ids),
            context_len=sequence.kv_len,
            ceiling=0 if is_prefill else min(request.k_ceiling, request.remaining - 1),
        )

    @property
    def num_rows(self) -> int:
        """Rows of the forward that it takes."""
        return len(self.input_ids) + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Rows whose logits it wants: the last input and every draft, at the end of the tokens."""
        return 1 + len(self.drafts) if self.is_last else 0

    @property
    def wanted(self) -> int:
        """Tokens that the paid drafter is asked for."""
        return self.k if self.paid else self.shadow

    @property
    def chosen(self) -> Chosen | None:
        """Where the target chose the last of the emitted tokens, once they are committed."""
        row = len(self.input_ids) - 1 + len(self.emitted) - 1
        if not self.emitted or row >= self.num_rows:
            return None
        return Chosen(self.run, self.first_row + row, len(self.request.sequence.token_ids) - 1)

    @property
    def paid_ceiling(self) -> int:
        """Largest k that the paid drafter may be asked for."""
        request = self.request
        drafter = request.paid_drafter
        if drafter is None:
            return 0
        most = min(self.ceiling, drafter.max_k)
        if most and hasattr(drafter, "room"):
            most = min(most, drafter.room(len(request.sequence.token_ids)))
        return most

    @property
    def behind(self) -> int:
        """Tokens that the paid drafter has to read first, besides what every draft reads."""
        behind = getattr(self.request.paid_drafter, "behind", None)
        return 0 if behind is None else int(behind(self.request.sequence.token_ids))

    @property
    def may_draft(self) -> bool:
        """Whether there is, or may be, something to verify."""
        return bool(self.proposed) or self.paid_ceiling > 0

    @property
    def drafter(self) -> Drafter | None:
        """The one whose drafts are verified, as long as it has not failed."""
        return self.request.paid_drafter if self.paid else self.request.free_drafter

    @property
    def drafter_name(self) -> str:
        """What counts of drafts are kept under."""
        drafter = self.drafter
        return self.request.drafter_name if drafter is None else source_of(drafter)

    @property
    def fixed_width(self) -> int:
        """Drafts that the request has asked for, as far as they fit; 0 if the policy decides."""
        request = self.request
        if not request.fixed_k:
            return 0
        return min(request.fixed_k, max(len(self.proposed), self.paid_ceiling))

    def view(self, fixed_width: int) -> RoundView:
        """Return what the policy may know.

        Args:
            fixed_width: what is drafted anyway, where the request has a k of its own.
        """
        request = self.request
        return RoundView(
            remaining=request.remaining,
            context_len=self.context_len,
            proposed=len(self.proposed),
            ceiling=self.ceiling,
            paid_ceiling=self.paid_ceiling,
            request=request.number,
            fixed_k=None if request.fixed_k is None else fixed_width,
            behind=self.behind,
        )

    def outcome(self, now: float) -> RoundOutcome:
        """Return what the round did; its time runs from the end of the request's last one."""
        request = self.request
        return RoundOutcome(
            k=len(self.drafts),
            paid=self.paid and bool(self.drafts),
            accepted=self.accepted,
            emitted=len(self.emitted),
            draft_s=self.draft_s + self.peek_s,
            verify_s=self.verify_s,
            round_s=now - request.stats.boundary_s,
            request=request.number,
            context_len=self.context_len,
            shadow=len(self.drafted) if self.shadow else 0,
            scores=request.scoring.emitted(self.emitted),
            shadow_scores=request.shadows.emitted(self.emitted),
            fixed=request.fixed_k is not None,
            caught_up=self.caught_up,
        )


def pack(batch: Sequence[Round], *, pad_to: int = 1) -> Rows:
    """Lay the rounds' rows out one after the other.

    Args:
        batch: at least one round; its pages are reserved.
        pad_to: if any round drafts, padding rows fill up to a multiple of this.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    logit_rows: list[int] = []
    drafting = False
    for index, part in enumerate(batch):
        first, start = len(token_ids), part.request.sequence.kv_len
        token_ids += part.input_ids
        if part.drafts:
            drafting = True
            token_ids += part.drafts
        end = len(token_ids)
        positions += range(start, start + end - first)
        sequences += [index] * (end - first)
        if part.is_last:
            logit_rows += range(end - 1 - len(part.drafts), end)
    if drafting:
        num_padding = -len(token_ids) % pad_to
        token_ids += [0] * num_padding
        positions += [PADDING_POSITION] * num_padding
        sequences += [0] * num_padding
    rows = np.array([token_ids, positions, sequences], np.int32)
    return Rows(
        token_ids=rows[0],
        positions=rows[1],
        sequences=rows[2],
        page_table=page_table([part.request.sequence.pages for part in batch]),
        logit_rows=np.array(logit_rows, np.int32),
        picks=_picks(batch),
    )


def _picks(batch: Sequence[Round]) -> Picks | None:
    """Return how the step samples, None where no request leaves that to it."""
    if not any([part.request.sampled_by_step for part in batch]):  # noqa: C419 - in every step
        return None
    rows: list[PickSettings] = []
    positions: list[int] = []
    for part in batch:
        request, first = part.request, len(part.request.sequence.token_ids)
        own = request.sampler.settings() if request.sampled_by_step else ARGMAX
        rows += [own] * part.num_logits
        positions += range(first, first + part.num_logits)
    if not rows:
        return None
    temperatures, top_k, top_p, min_p, seeds, choices = zip(*rows, strict=True)
    return Picks(
        temperatures=np.array(temperatures, np.float32),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float64),
        min_p=np.array(min_p, np.float64),
        seeds=np.array(seeds, np.uint64),
        choices=np.array(choices, np.uint32),
        positions=np.array(positions, np.uint32),
    )


def padding_multiple(config: EngineConfig) -> int:
    """Return the row multiple that a config pads verifies to.

    A tile is tile_m rows, live or not. No other kernel gains from padding yet, so "auto" is none.
    """
    tile = config.tile_m if config.verify_kernel == "tile" else 1
    return tile if config.verify_pad in ("auto", "off") else math.lcm(tile, int(config.verify_pad))
