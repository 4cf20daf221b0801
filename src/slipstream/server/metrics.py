"""Prometheus metrics: what the engine counted, and what the server told.

Counters are stored and ratios left to whoever reads them, and names and suffixes are vLLM's
wherever the meaning is the same, so that its dashboards need only another prefix. Every label has
few values that are known beforehand: k and position up to 15, causes, sources, reasons, statuses.

A scrape waits for nobody. The engine's thread alone writes its counters, which are plain numbers
and dicts of them: a number is read in one piece and a dict copied in one (`engine.totals.copied`),
so that a scrape in the middle of a step sees each as it was before or after a change. Two counters
of one scrape may be a step apart. What the server tells once a request goes through the library's
locks; what it tells once a chunk are plain numbers again, told by the engine's thread alone.

docs/metrics.md lists every metric.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from slipstream.engine.causes import CAUSES
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.engine.threaded import ThreadedEngine
from slipstream.engine.totals import RoundTotals, accepted_by_position, by_source, copied
from slipstream.types import MAX_K

PREFIX = "slipstream:"
# From a cached prompt of a small model to a long prompt of a large one behind a queue.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# From half a millisecond, a small model on a GPU, to a large one on a CPU.
INTER_TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
FINISH_REASONS = ("stop", "length", "cancelled", "error")
# Statuses that a server gives on purpose; any other counts as "other".
STATUSES = (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 499, 500, 503, 504)
OTHER = "other"


class Metrics:
    """Everything that `/metrics` shows of one engine and the server around it.

    Args:
        engine: may be running.
    """

    def __init__(self, engine: Engine | ThreadedEngine) -> None:
        self._registry = CollectorRegistry()
        core = engine.engine if isinstance(engine, ThreadedEngine) else engine
        self._registry.register(_EngineCollector(core))
        self._received = self._counter("requests_received", "Requests that came in.")
        self._started = self._counter(
            "requests_started", "Choices that were queued, by speculation mode.", "speculation"
        )
        self._finished = self._counter(
            "requests_finished", "Choices that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "requests_rejected", "Requests that were refused, by HTTP status.", "status"
        )
        self._first_token = _Latencies(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = _Latencies(
            "inter_token_latency_seconds",
            "From one token to the next; those of one round share its time.",
            INTER_TOKEN_BUCKETS,
        )
        self._registry.register(self._first_token)
        self._registry.register(self._inter_token)
        for counter, values in (
            (self._started, ("auto", "off", "fixed")),
            (self._finished, FINISH_REASONS),
        ):
            for value in values:
                counter.labels(value)  # a series is there, at 0, before its first event

    def received(self) -> None:
        """Count a request that came in, whatever becomes of it."""
        self._received.inc()

    def started(self, request: Request) -> None:
        """Count a choice that was queued."""
        fixed_k = request.fixed_k
        self._started.labels("auto" if fixed_k is None else "fixed" if fixed_k else "off").inc()

    def first_token(self, seconds: float) -> None:
        """Take in a request's time to its first token. One thread only calls this."""
        self._first_token.add(seconds, 1)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Take in the time from a token to the next. One thread only calls this.

        Args:
            count: tokens that came together, each of which took `seconds`.
        """
        self._inter_token.add(seconds, count)

    def finished(self, reason: str) -> None:
        """Count a choice that ended; an unknown reason counts as "other"."""
        self._finished.labels(reason if reason in FINISH_REASONS else OTHER).inc()

    def rejected(self, status: int) -> None:
        """Count a request that was refused with an HTTP status; an unusual one is "other"."""
        self._rejected.labels(str(status) if status in STATUSES else OTHER).inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)


class _Latencies(Collector):
    """A histogram without a lock: it is added to in every round, by one thread.

    Args:
        buckets: upper ends in seconds, ascending; one more takes what is above.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text = PREFIX + name, text
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(self._buckets) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Take in `count` times of as many seconds each."""
        self._counts[bisect_left(self._buckets, seconds)] += count
        self._sum_s += count * seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        ends = [*map(str, map(float, self._buckets)), "+Inf"]
        counts = accumulate(list(self._counts))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(ends, counts, strict=True)), self._sum_s)
        yield family


class _EngineCollector(Collector):
    """Reads an engine's counters when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        rounds = self._engine.stats.rounds
        yield from _drafts(rounds)
        yield from _rounds(rounds)
        yield from _drafting(rounds)
        yield from self._budget()
        yield from self._load()

    def _budget(self) -> Iterator[Metric]:
        policy, rounds = self._engine.policy, self._engine.stats.rounds
        if policy is None:
            return
        ledger = policy.ledger
        yield _gauge("spec_decode_debt_seconds", "Lost to drafting, not yet paid.", ledger.debt_s)
        yield _gauge(
            "spec_decode_debt_capacity_seconds",
            "Debt beyond which no round may draft; 0 before a classic step was measured.",
            ledger.capacity_steps * rounds.classic_step_s,
        )
        yield _gauge(
            "spec_decode_saved_seconds",
            "Gained by drafting and kept for a hiccup; nothing is owed then.",
            ledger.saved_s,
        )

    def _load(self) -> Iterator[Metric]:
        engine, stats, pages = self._engine, self._engine.stats, self._engine.pages
        running, total, used = len(engine.running), engine.num_requests, pages.num_taken
        yield _gauge("num_requests_running", "Choices that take part in steps.", running)
        waiting = max(0, total - running)  # a step may have come in between
        yield _gauge("num_requests_waiting", "Choices that wait for their turn.", waiting)
        yield _gauge("kv_pages_used", "KV pages that running requests hold.", used)
        yield _gauge(
            "kv_pages_free", "KV pages that may be taken, cached ones included.", pages.num_free
        )
        yield _gauge("kv_cache_usage_perc", "Share of KV pages in use.", used / pages.num_pages)
        yield _counter("steps", "Forwards.", stats.steps)
        yield _counter("step_rows", "Rows of all forwards, padding excluded.", stats.rows)
        yield _counter("prompt_tokens", "Tokens of prompts that were read.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.completion_tokens)
        yield _counter(
            "prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens
        )
        yield _counter("prefix_cache_hits", "Prompt tokens found there.", stats.cached_tokens)


def _drafts(rounds: RoundTotals) -> Iterator[Metric]:
    outcomes = copied(rounds.outcomes)
    drafted, accepted = accepted_by_position(outcomes)
    yield _counter("spec_decode_num_drafts", "Rounds that verified drafts.", sum(outcomes.values()))
    yield _counter("spec_decode_num_draft_tokens", "Drafted tokens verified.", sum(drafted))
    yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens emitted.", sum(accepted))
    for name, text, counts in (
        ("spec_decode_num_draft_tokens_per_pos", "Verified, by position from 0.", drafted),
        ("spec_decode_num_accepted_tokens_per_pos", "Emitted, by position from 0.", accepted),
    ):
        yield _counters(name, text, "position", _by_index(counts))
    sources = by_source(outcomes)
    for name, text, index in (
        ("spec_decode_source_draft_tokens", "Drafted tokens verified, by source.", 0),
        ("spec_decode_source_accepted_tokens", "Drafted tokens emitted, by source.", 1),
    ):
        values = {source: counts[index] for source, counts in sources.items()}
        yield _counters(name, text, "source", values)
    widths = [0.0] * (MAX_K + 1)
    for (_, k, _accepted), count in outcomes.items():
        widths[k] += count
    undrafted = copied(rounds.undrafted)
    widths[0] = sum(undrafted.values())
    yield _counters(
        "spec_decode_rounds", "Decoding rounds by drafted tokens.", "k", _by_index(widths)
    )
    yield _counters(
        "spec_decode_undrafted_rounds",
        "Decoding rounds that drafted nothing, by cause.",
        "cause",
        dict.fromkeys(CAUSES, 0) | undrafted,
    )


def _rounds(rounds: RoundTotals) -> Iterator[Metric]:
    for name, text, counts, sums in (
        (
            "spec_decode_round_seconds",
            "Measured rounds by drafted tokens, steps that read prompts excepted.",
            rounds.timed,
            rounds.timed_s,
        ),
        (
            "spec_decode_round_predicted_seconds",
            "What the cost model expected of them, where it knew.",
            rounds.predicted,
            rounds.predicted_s,
        ),
    ):
        family = SummaryMetricFamily(PREFIX + name, text, labels=["k"])
        for k, (count, total) in enumerate(zip(counts, sums, strict=True)):
            family.add_metric([str(k)], count_value=count, sum_value=total)
        yield family


def _drafting(rounds: RoundTotals) -> Iterator[Metric]:
    draft_s = copied(rounds.draft_s)
    yield _counters("spec_decode_draft_seconds", "Time spent drafting.", "source", draft_s)
    yield _counter(
        "spec_decode_unused_draft_seconds",
        "Time spent drafting in rounds that then verified nothing.",
        rounds.unused_draft_s,
    )
    yield _counter("step_seconds", "Time of all steps, those of prompts included.", rounds.busy_s)
    yield _counter("decode_seconds", "Time of decoding steps of known worth.", rounds.decode_s)
    yield _counter(
        "decode_classic_seconds",
        "What classic steps would have taken for the same tokens.",
        rounds.worth_s,
    )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _by_index(counts: Sequence[float]) -> dict[str, float]:
    return {str(index): count for index, count in enumerate(counts)}
