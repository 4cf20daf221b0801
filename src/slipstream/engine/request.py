"""One choice of a request, carried through its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.drafters.base import Chosen, Drafter
from slipstream.engine.matcher import Matcher
from slipstream.engine.pages import pages_for
from slipstream.engine.sampling import RowHistory, Sampler, TokenLogprobs
from slipstream.engine.sequence import TokenSequence
from slipstream.engine.stats import ReplyStats
from slipstream.engine.text import ReplyText
from slipstream.errors import SlipstreamError
from slipstream.policy.base import Policy
from slipstream.policy.scoring import Scoring
from slipstream.types import FinishReason, KSetting


@dataclass(kw_only=True, eq=False)
class Request:
    """A request on its way; one with n choices is n of these with one id.

    Attributes:
        number: unlike the id, every choice has one of its own.
        choice: which of the choices it is, from 0.
        limit: tokens it may emit, its own limit and the context's room considered.
        k_ceiling: largest k that engine, drafter and request allow.
        fixed_k: what it drafts whatever the policy thinks, 0 for never; None leaves it to the
            policy.
        chosen: where the target chose the last token, if its paid drafter asks for it.
        scoring: follows what its free drafter offered and nobody verified.
        shadows: the same of what its paid drafter drafted only to be scored.
        free_drafter: proposes before the policy decides; None without one, or once it failed.
        paid_drafter: drafts as much as the policy decides; None likewise.
        drafter_name: what reports call them, "none" for none.
        drafter_failure: why a drafter was dropped, None if none was.
        history: what the sampler goes by; None where a step's own choice is what it would pick.
        min_tokens: a stop string does not end the reply before it has that many tokens.
        logprobs: one entry per token, if they are reported.
        error: why it cannot go on, set where it ends with finish_reason "error".
    """

    id: int
    number: int
    choice: int
    sequence: TokenSequence
    limit: int
    stop_ids: frozenset[int]
    seed: int
    requested_k: KSetting
    k_ceiling: int
    fixed_k: int | None
    policy: Policy
    free_drafter: Drafter | None
    paid_drafter: Drafter | None
    drafter_name: str
    drafter_failure: str | None
    sampler: Sampler
    history: RowHistory | None
    min_tokens: int
    reports_logprobs: bool
    num_choices: int
    text: ReplyText
    chosen: Chosen | None = None
    scoring: Scoring = field(default_factory=Scoring)
    shadows: Scoring = field(default_factory=Scoring)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: SlipstreamError | None = None
    stats: ReplyStats = field(default_factory=ReplyStats)
    finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.limit - self.sequence.num_generated

    @property
    def matcher(self) -> Matcher | None:
        """Where its reply stands in its grammar, None without one."""
        return None if self.history is None else self.history.matcher

    @property
    def sampled_by_step(self) -> bool:
        """Whether a step picks its tokens, by the sampler's settings."""
        return self.history is None and not self.sampler.is_argmax

    @property
    def reads_logits(self) -> bool:
        """Whether it looks at more of a step than its argmax."""
        return self.history is not None or self.reports_logprobs

    @property
    def max_pages(self) -> int:
        """Pages that it needs at most: the last token has no KV, and drafts never go beyond it."""
        return pages_for(self.sequence.prompt_len + self.limit - 1)
