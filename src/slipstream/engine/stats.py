"""What a reply, and an engine, cost: counters are stored, ratios derived when asked for.

Time is contiguous: a round runs from the end of the one before to its own end, so whatever the host
does in between is in some round, and the rounds of a reply add up to its decode time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.engine.totals import RoundTotals
from slipstream.policy.base import Policy, RoundOutcome
from slipstream.types import KSetting, SpeculationReport, Timing

if TYPE_CHECKING:
    from slipstream.engine.round import Round


@dataclass(kw_only=True)
class ReplyStats:
    """Counters of one reply; seconds are sums.

    Attributes:
        started_s: when its prefill began, None before.
        first_token_s: when prefill gave the first token, None before.
        boundary_s: when the last round ended, which is when the next one starts.
        outcomes: rounds by (drafted tokens, how many of them were emitted), k > 0.
        sources: drafted tokens, and how many of them were emitted, by drafter.
        undrafted: rounds with k = 0 by cause, a key of `CAUSES`.
    """

    started_s: float | None = None
    first_token_s: float | None = None
    boundary_s: float = 0.0
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    sources: dict[str, list[int]] = field(default_factory=dict)
    undrafted: dict[str, int] = field(default_factory=dict)
    classic_rounds: int = 0
    classic_s: float = 0.0
    round_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds with k > 0."""
        return self.outcomes.total()

    @property
    def drafted(self) -> int:
        """Drafted tokens that were verified."""
        return sum(k * rounds for (k, _), rounds in self.outcomes.items())

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(accepted * rounds for (_, accepted), rounds in self.outcomes.items())

    @property
    def k_histogram(self) -> Counter[int]:
        """Rounds by drafted tokens, k > 0."""
        histogram: Counter[int] = Counter()
        for (k, _), rounds in self.outcomes.items():
            histogram[k] += rounds
        return histogram

    def start(self, now: float) -> None:
        """Note that prefill begins, once."""
        if self.started_s is None:
            self.started_s = now

    def first_token(self, now: float) -> None:
        """Note that prefill gave the first token."""
        self.first_token_s = self.boundary_s = now

    def classic(self, now: float) -> None:
        """Count a classic round that ends now."""
        self.classic_rounds += 1
        self.classic_s += now - self.boundary_s
        self.boundary_s = now

    def observe(self, outcome: RoundOutcome, drafter: str, now: float) -> None:
        """Count one round that ends now.

        Args:
            drafter: whose drafts were verified.
        """
        if outcome.k == 0:
            self.classic(now)
            return
        self.boundary_s = now
        accepted = min(outcome.accepted, outcome.emitted)
        self.outcomes[outcome.k, accepted] += 1
        counts = self.sources.setdefault(drafter, [0, 0])
        counts[0] += outcome.k
        counts[1] += accepted
        self.round_s += outcome.round_s
        self.verify_s += outcome.verify_s
        self.draft_s += outcome.draft_s

    def timing(self, *, load_s: float, completion_tokens: int) -> Timing:
        """Return the reply's times; a phase that never came has 0 seconds."""
        prefill_s = decode_s = 0.0
        if self.started_s is not None and self.first_token_s is not None:
            prefill_s = self.first_token_s - self.started_s
            decode_s = self.boundary_s - self.first_token_s
        return Timing(
            load_s=load_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            decode_tokens_per_s=(completion_tokens - 1) / decode_s if decode_s > 0 else 0.0,
        )

    def report(
        self, *, policy: Policy, reason: str, requested_k: KSetting, drafter: str
    ) -> SpeculationReport:
        """Return the reply's speculation block; means are None where there was no round."""
        rounds = self.rounds
        overhead_s = self.round_s - self.verify_s - self.draft_s
        sources = {name: [0, 0] for name in drafter.split("+") if drafter != "none"}
        sources |= self.sources
        return SpeculationReport(
            mode=policy.mode,
            drafter=drafter,
            verdict=policy.verdict,
            reason=reason,
            requested_k=requested_k,
            mean_drafted=_mean(self.drafted, rounds),
            rounds=rounds,
            classic_rounds=self.classic_rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_length=1 + self.accepted / rounds if rounds else None,
            k_histogram={str(k): n for k, n in sorted(self.k_histogram.items())},
            classic_ms=_mean(1000 * self.classic_s, self.classic_rounds),
            verify_ms=_mean(1000 * self.verify_s, rounds),
            draft_ms=_mean(1000 * self.draft_s, rounds),
            overhead_ms=_mean(1000 * overhead_s, rounds),
            predicted_speedup=policy.predicted_speedup,
            sources={
                name: {"drafted": drafted, "accepted": accepted}
                for name, (drafted, accepted) in sources.items()
            },
            undrafted=dict(sorted(self.undrafted.items(), key=lambda item: -item[1])),
        )


@dataclass(kw_only=True)
class EngineStats:
    """Counters of an engine since it was made.

    Attributes:
        steps: forwards.
        rows: rows of all forwards, padding excluded.
        prompt_tokens: of prompts that were read to their end.
        cached_tokens: how many of them the prefix cache had.
        completion_tokens: tokens emitted.
        finished, cancelled: choices that ended by themselves or were ended.
        dropped: choices that ended with a step that failed.
        rounds: what their rounds came to.
    """

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    dropped: int = 0
    rounds: RoundTotals = field(default_factory=RoundTotals)

    def count(
        self, batch: Sequence[Round], began: float, now: float, decided_s: float = 0.0
    ) -> None:
        """Count a step that ends now.

        Args:
            decided_s: what the policy itself took of it.
        """
        self.steps += 1
        self.rounds.count(batch, now - began, decided_s)
        for part in batch:
            self.rows += part.num_rows
            self.completion_tokens += len(part.emitted)
            if part.is_prefill and part.is_last:
                sequence = part.request.sequence
                part.request.stats.first_token(now)
                self.prompt_tokens += sequence.prompt_len
                self.cached_tokens += sequence.num_cached


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
