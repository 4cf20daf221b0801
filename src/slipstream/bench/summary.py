"""From trials to rows: one for each arm, category and batch, and one over all categories.

Throughput is total tokens over total seconds, and a speedup is the ratio of two throughputs on the
same prompts. Counters are summed before anything is divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slipstream.bench.arms import Arm
from slipstream.bench.interval import Pair, Passes, interval, throughput_ratio
from slipstream.bench.model import seconds_of
from slipstream.bench.run import Run
from slipstream.bench.trial import Trial
from slipstream.bench.workload import OVERALL
from slipstream.types import MAX_K, KSetting

# A fixed k that ran another width than asked for, by more than this share, is shown with that.
EFFECTIVE = 0.05

Outcome = Literal["gain", "loss", "even", "unsure"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an arm did in one category at one batch; the fields are the JSON contract.

    Attributes:
        name: the arm as shown: "k=8 (ran 2.1)" where that is what it drafted in the mean.
        requested_k: 0, a number of drafted tokens, "auto", or None for a peer.
        variant: how verify rows were run, "" for a peer.
        prompts: turns that were answered, those of one conversation one by one.
        mean_drafted: drafted tokens of a round with k > 0.
        tokens, seconds: decoded, all passes together.
        speedup: over classic decoding of the same variant; ci is its 95 % interval.
        outcome: gain or loss if the interval says so, even if it is narrow around 1, else unsure.
        acceptance_length: accepted + 1, mean over rounds with k > 0.
        acceptance_by_position: of the tokens drafted at a place, how many were accepted, given
            that those before were.
        drafted_by_position: how many tokens that was at each place.
        k_histogram: rounds of each k, classic ones under "0".
        latency_ms: per token: its round's time over its round's tokens; `worst` is the longest
            round.
        classic_ms, verify_ms, draft_ms, overhead_ms: means of a round.
        predicted_speedup: what the forwards timed before the run say of the rounds that were run,
            the host's part of a step as classic steps have it.
        forecast: the mean of what the policy predicted at the end of each reply, for rounds that
            draft at its best width.
        verdicts: what the policy said there.
    """

    name: str
    requested_k: KSetting | None
    variant: str
    category: str
    batch: int
    prompts: int
    conversations: int
    tokens: int
    seconds: float
    tokens_per_s: float | None
    speedup: float | None
    ci: tuple[float, float] | None
    outcome: Outcome
    mean_drafted: float | None
    rounds: int
    classic_rounds: int
    acceptance_length: float | None
    acceptance_by_position: list[float]
    drafted_by_position: list[int]
    k_histogram: dict[str, int]
    latency_ms: dict[str, float]
    classic_ms: float | None
    verify_ms: float | None
    draft_ms: float | None
    overhead_ms: float | None
    predicted_speedup: float | None
    forecast: float | None
    verdicts: dict[str, int]


class Trials:
    """A run's trials by arm, category and batch.

    Args:
        times_s: seconds of forwards by row count, of each variant's name, timed before the run.
    """

    def __init__(self, run: Run, times_s: dict[str, dict[int, float]]) -> None:
        self.run = run
        self._times_s = times_s
        self._by_cell: dict[tuple[int, int, str], list[Trial]] = {}
        for trial in run.trials:
            group = run.groups[trial.group]
            self._by_cell.setdefault((trial.arm, group.batch, group.category), []).append(trial)

    @property
    def batches(self) -> list[int]:
        """Batches that were run, in order."""
        return sorted({batch for _, batch, _ in self._by_cell})

    @property
    def categories(self) -> list[str]:
        """Categories that were run, in order."""
        return list(dict.fromkeys(category for _, _, category in self._by_cell))

    def rows(self) -> list[Row]:
        """Return every row: batch after batch, category after category, `OVERALL` first."""
        return [
            self._row(index, batch, categories)
            for batch in self.batches
            for categories in ([OVERALL], *([name] for name in self.categories))
            for index in range(len(self.run.arms))
            if self._of(index, batch, categories)
        ]

    def ratio(
        self, arm: int, base: int, batch: int, category: str = OVERALL
    ) -> tuple[float | None, tuple[float, float] | None]:
        """Return how many times faster an arm is than another, and the interval of that."""
        strata = [
            self._pairs(arm, base, batch, name)
            for name in (self.categories if category == OVERALL else [category])
        ]
        return throughput_ratio([pair for pairs in strata for pair in pairs]), interval(strata)

    def classic_of(self, arm: Arm) -> int:
        """Return the arm that an arm is compared with: classic of its variant, or of the first."""
        variant = arm.variant or self.run.arms[0].variant
        return next(
            index
            for index, other in enumerate(self.run.arms)
            if other.is_classic and other.variant == variant
        )

    def _of(self, arm: int, batch: int, categories: Sequence[str]) -> list[Trial]:
        wanted = self.categories if list(categories) == [OVERALL] else categories
        return [trial for name in wanted for trial in self._by_cell.get((arm, batch, name), [])]

    def _pairs(self, arm: int, base: int, batch: int, category: str) -> list[Pair]:
        """Return the passes of each set of conversations under both arms.

        The turns of a conversation hang together, so they are one draw, not several; a turn counts
        if both arms answered it.
        """
        sides = [self._by_group(index, batch, category) for index in (arm, base)]
        sums: dict[object, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
        for group in sides[0].keys() & sides[1].keys():
            both = sums.setdefault(self.run.groups[group].conversations, ({}, {}))
            for side, totals in zip(sides, both, strict=True):
                for trial in side[group]:
                    total = totals.setdefault(trial.turn, [0.0, 0.0])
                    total[0] += trial.tokens
                    total[1] += trial.seconds
        return [(_passes(first), _passes(second)) for first, second in sums.values()]

    def _by_group(self, arm: int, batch: int, category: str) -> dict[int, list[Trial]]:
        """Return an arm's trials by group; replies without a second token say nothing."""
        out: dict[int, list[Trial]] = {}
        for trial in self._by_cell.get((arm, batch, category), []):
            if trial.tokens > 0 and trial.seconds > 0:
                out.setdefault(trial.group, []).append(trial)
        return out

    def _row(self, index: int, batch: int, categories: Sequence[str]) -> Row:
        arm = self.run.arms[index]
        trials = self._of(index, batch, categories)
        base = self.classic_of(arm)
        speedup, ci = self.ratio(index, base, batch, categories[0])
        outcomes: Counter[tuple[int, int]] = Counter()
        verdicts: Counter[str] = Counter()
        for trial in trials:
            outcomes += trial.outcomes
            verdicts += trial.verdicts
        rounds = outcomes.total()
        classic_rounds = sum(trial.classic_rounds for trial in trials)
        drafted = sum(k * count for (k, _), count in outcomes.items())
        accepted = sum(taken * count for (_, taken), count in outcomes.items())
        histogram = Counter({0: classic_rounds} if classic_rounds else {})
        for (k, _), count in outcomes.items():
            histogram[k] += count
        tokens = sum(trial.tokens for trial in trials)
        seconds = sum(trial.seconds for trial in trials)
        spent = [sum(getattr(trial, name) for trial in trials) for name in _SECONDS]
        round_s, verify_s, draft_s, classic_s = spent
        mean_drafted = drafted / rounds if rounds else None
        by_position = _by_position(outcomes)
        return Row(
            name=_shown(arm, mean_drafted),
            requested_k=arm.k,
            variant=arm.variant.name if arm.variant else "",
            category=categories[0],
            batch=batch,
            prompts=batch * len({trial.group for trial in trials}),
            conversations=len(
                {c for trial in trials for c in self.run.groups[trial.group].conversations}
            ),
            tokens=tokens,
            seconds=seconds,
            tokens_per_s=tokens / seconds if seconds else None,
            speedup=speedup,
            ci=None if index == base else ci,
            outcome="even" if index == base else _outcome(ci),
            mean_drafted=mean_drafted,
            rounds=rounds,
            classic_rounds=classic_rounds,
            acceptance_length=1 + accepted / rounds if rounds else None,
            acceptance_by_position=[passed / tried for tried, passed in by_position],
            drafted_by_position=[tried for tried, _ in by_position],
            k_histogram={str(k): count for k, count in sorted(histogram.items())},
            latency_ms=_latency([wait for trial in trials for wait in trial.waits]),
            classic_ms=_mean_ms(classic_s, classic_rounds),
            verify_ms=_mean_ms(verify_s, rounds),
            draft_ms=_mean_ms(draft_s, rounds),
            overhead_ms=_mean_ms(round_s - verify_s - draft_s, rounds),
            predicted_speedup=self._predicted(trials, self._of(base, batch, categories), arm),
            forecast=_mean([forecast for trial in trials for forecast in trial.forecasts]),
            verdicts=dict(verdicts),
        )

    def _predicted(self, own: list[Trial], base: list[Trial], arm: Arm) -> float | None:
        """Return the speedup that forwards timed before the run make of the steps that were run.

        To each forward comes what the host does besides, as classic steps show it.
        """
        if arm.variant is None or not (times_s := self._times_s.get(arm.variant.name)):
            return None

        def forwards_s(trials: list[Trial]) -> float:
            counts: Counter[int] = Counter()
            for trial in trials:
                counts += trial.forwards
            return sum(count * seconds_of(times_s, rows) for rows, count in counts.items())

        def steps(trials: list[Trial]) -> int:
            return sum(trial.forwards.total() for trial in trials)

        base_s = sum(trial.seconds for trial in base)
        if not base_s or not steps(own):
            return None
        host_s = max(base_s - forwards_s(base), 0.0) / steps(base)
        own_s = forwards_s(own) + sum(trial.draft_s for trial in own) + host_s * steps(own)
        classic_s = forwards_s(base) + host_s * steps(base)
        tokens = [sum(trial.tokens for trial in trials) for trials in (own, base)]
        return tokens[0] / own_s / (tokens[1] / classic_s) if tokens[1] else None


_SECONDS = ("round_s", "verify_s", "draft_s", "classic_s")


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON values, rounded to what means something."""
    return {name: _rounded(value) for name, value in vars(row).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _passes(totals: dict[int, list[float]]) -> Passes:
    return Passes(
        tokens=[tokens for tokens, _ in totals.values()],
        seconds=[seconds for _, seconds in totals.values()],
    )


def _shown(arm: Arm, mean_drafted: float | None) -> str:
    if not isinstance(arm.k, int) or arm.k == 0:
        return arm.name
    if mean_drafted is None:
        return f"{arm.name} (never ran)"
    off = abs(mean_drafted / arm.k - 1) > EFFECTIVE
    return f"{arm.name} (ran {mean_drafted:.1f})" if off else arm.name


def _outcome(ci: tuple[float, float] | None) -> Outcome:
    if ci is None:
        return "unsure"
    low, high = ci
    if low > 1:
        return "gain"
    if high < 1:
        return "loss"
    return "even" if low > 0.98 and high < 1.02 else "unsure"


def _by_position(outcomes: Counter[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return, for each place, how often those before were accepted, and how often it was too."""
    out = []
    for place in range(MAX_K):
        tried = sum(n for (k, taken), n in outcomes.items() if k > place and taken >= place)
        if not tried:
            break
        passed = sum(n for (k, taken), n in outcomes.items() if k > place and taken > place)
        out.append((tried, passed))
    return out


def _latency(waits: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return milliseconds a token: median, 95th percentile, and the longest round."""
    waits = [(seconds, tokens) for seconds, tokens in waits if tokens]
    if not waits:
        return {}
    paces = np.repeat([s / n for s, n in waits], [n for _, n in waits])
    p50, p95 = np.quantile(paces, [0.5, 0.95])
    worst = max(seconds for seconds, _ in waits)
    return {"p50": 1e3 * float(p50), "p95": 1e3 * float(p95), "worst": 1e3 * worst}


def _mean_ms(seconds: float, count: int) -> float | None:
    return 1e3 * seconds / count if count else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
