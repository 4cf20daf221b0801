"""What Prometheus gets: the engine's own counters, under names and labels that stay."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the server's extra is not installed")

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.causes import CAUSES
from slipstream.engine.engine import Engine
from slipstream.engine.threaded import ThreadedEngine
from slipstream.server.metrics import FINISH_REASONS, STATUSES, Metrics
from slipstream.types import MAX_K, SamplingParams
from tests.fake_model import fake_engine
from tests.machine import PROMPT, Machine, engine_on, flat, one, perfect

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "metrics.md"


def families(metrics: Metrics) -> dict[str, Metric]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    found = list(text_string_to_metric_families(body.decode("utf-8")))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found if not family.name.endswith("_created")}


def value(metrics: Metrics, sample: str, **labels: str) -> float:
    body, _ = metrics.render()
    for family in text_string_to_metric_families(body.decode("utf-8")):
        for found in family.samples:
            if found.name == sample and found.labels == labels:
                return found.value
    raise AssertionError(f"no sample {sample} {labels}")


def drafting_engine(**settings: object) -> Engine:
    wrong: Callable[[int, int], bool] = lambda number, place: (number + place) % 4 == 3  # noqa: E731
    return engine_on(Machine(flat), perfect(is_wrong=wrong), **settings)  # type: ignore[arg-type]


def test_speculation_counters_agree_with_the_reply() -> None:
    engine = drafting_engine()
    metrics = Metrics(engine)
    report = one(engine).speculation
    assert report.rounds > 10
    name = "slipstream:spec_decode_"
    assert value(metrics, f"{name}num_drafts_total") == report.rounds
    assert value(metrics, f"{name}num_draft_tokens_total") == report.drafted
    assert value(metrics, f"{name}num_accepted_tokens_total") == report.accepted
    per_position = [
        value(metrics, f"{name}num_accepted_tokens_per_pos_total", position=str(index))
        for index in range(MAX_K)
    ]
    assert sum(per_position) == report.accepted
    assert per_position == sorted(per_position, reverse=True)
    for k, count in report.k_histogram.items():
        assert value(metrics, f"{name}rounds_total", k=k) == count
    assert value(metrics, f"{name}rounds_total", k="0") == report.classic_rounds
    assert value(metrics, f"{name}source_draft_tokens_total", source="scripted") == report.drafted
    assert (
        value(metrics, f"{name}source_accepted_tokens_total", source="scripted") == report.accepted
    )


def test_predicted_and_measured_rounds_stand_side_by_side() -> None:
    engine = engine_on(Machine(flat), perfect(), k=5)
    metrics = Metrics(engine)
    one(engine)
    means = [
        value(metrics, f"slipstream:spec_decode_{name}_sum", k="5")
        / value(metrics, f"slipstream:spec_decode_{name}_count", k="5")
        for name in ("round_seconds", "round_predicted_seconds")
    ]
    assert means == [pytest.approx(flat(6)), pytest.approx(flat(6))]


def test_debt_and_capacity_are_the_ledgers() -> None:
    engine = drafting_engine()
    metrics = Metrics(engine)
    one(engine)
    assert engine.policy is not None
    engine.policy.ledger.debt_s = 0.0125
    assert value(metrics, "slipstream:spec_decode_debt_seconds") == 0.0125
    assert value(metrics, "slipstream:spec_decode_debt_capacity_seconds") == pytest.approx(
        8 * flat(1), rel=0.05
    )


def test_load_is_what_runs_and_waits() -> None:
    engine = fake_engine(drafter=NGramDrafter, max_num_seqs=2)
    metrics = Metrics(engine)
    for _ in range(5):
        engine.submit(PROMPT, SamplingParams(max_tokens=30))
    engine.step()
    assert value(metrics, "slipstream:num_requests_running") == 2
    assert value(metrics, "slipstream:num_requests_waiting") == 3
    used = value(metrics, "slipstream:kv_pages_used")
    assert used == engine.pages.num_taken > 0
    assert value(metrics, "slipstream:kv_pages_free") == engine.pages.num_free
    assert value(metrics, "slipstream:kv_cache_usage_perc") == used / engine.pages.num_pages
    while engine.num_requests:
        engine.step()
    assert value(metrics, "slipstream:generation_tokens_total") == 150
    assert value(metrics, "slipstream:prompt_tokens_total") == 5 * len(PROMPT)
    assert value(metrics, "slipstream:num_requests_running") == 0
    assert value(metrics, "slipstream:kv_pages_used") == 0


def test_what_the_server_tells_is_counted() -> None:
    engine = fake_engine(drafter=NGramDrafter)
    metrics = Metrics(engine)
    for _ in range(4):
        metrics.received()
    for k in ("auto", "off", 3):
        metrics.started(engine.check(PROMPT, SamplingParams(k=k))[0])  # type: ignore[arg-type]
    metrics.first_token(0.03)
    for _ in range(4):
        metrics.inter_token(0.004)
    metrics.inter_token(0.004, 6)
    metrics.first_token(1e9)
    metrics.finished("stop")
    metrics.rejected(429)
    assert value(metrics, "slipstream:requests_received_total") == 4
    for mode in ("auto", "off", "fixed"):
        assert value(metrics, "slipstream:requests_started_total", speculation=mode) == 1
    assert value(metrics, "slipstream:requests_finished_total", finished_reason="stop") == 1
    assert value(metrics, "slipstream:requests_finished_total", finished_reason="length") == 0
    assert value(metrics, "slipstream:requests_rejected_total", status="429") == 1
    first = "slipstream:time_to_first_token_seconds"
    assert value(metrics, f"{first}_bucket", le="0.025") == 0
    assert value(metrics, f"{first}_bucket", le="0.05") == 1
    assert value(metrics, f"{first}_bucket", le="60.0") == 1
    assert value(metrics, f"{first}_bucket", le="+Inf") == 2
    assert value(metrics, f"{first}_count") == 2
    assert value(metrics, "slipstream:inter_token_latency_seconds_sum") == pytest.approx(0.04)
    assert value(metrics, "slipstream:inter_token_latency_seconds_count") == 10


def test_labels_are_bounded_whatever_is_told() -> None:
    engine = fake_engine(drafter=NGramDrafter)
    metrics = Metrics(engine)
    for number in range(300):
        metrics.rejected(300 + number)
        metrics.finished(f"reason {number}")
    engine.stats.rounds.undrafted["other"] = 3
    found = families(metrics)
    values = {
        family.name: {sample.labels[key] for sample in family.samples for key in sample.labels}
        for family in found.values()
    }
    assert values["slipstream:requests_rejected"] == {str(s) for s in STATUSES} | {"other"}
    assert values["slipstream:requests_finished"] == {*FINISH_REASONS, "other"}
    assert values["slipstream:spec_decode_undrafted_rounds"] == set(CAUSES)
    assert values["slipstream:spec_decode_rounds"] == {str(k) for k in range(MAX_K + 1)}
    total = sum(len(family.samples) for family in found.values())
    assert total < 300


def test_every_series_is_there_before_its_first_event() -> None:
    before = {
        name: {tuple(sorted(sample.labels.items())) for sample in family.samples}
        for name, family in families(Metrics(drafting_engine())).items()
    }
    for name in ("spec_decode_rounds", "spec_decode_undrafted_rounds", "requests_finished"):
        assert before[f"slipstream:{name}"]


def test_an_engine_that_never_drafts_has_no_budget_and_all_else() -> None:
    engine = fake_engine()
    engine.generate([PROMPT], SamplingParams(max_tokens=10))
    metrics = Metrics(engine)
    assert "slipstream:spec_decode_debt_seconds" not in families(metrics)
    assert value(metrics, "slipstream:spec_decode_undrafted_rounds_total", cause="off") == 9


def test_counters_never_fall() -> None:
    engine = drafting_engine(max_num_seqs=3)
    metrics = Metrics(engine)
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for _ in range(3):
        engine.submit(PROMPT, SamplingParams(max_tokens=40))
    while engine.num_requests:
        engine.step()
        for family in families(metrics).values():
            if family.type == "gauge":
                continue
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert sample.value >= before.get(key, 0.0), key
                before[key] = sample.value


def test_scrapes_from_other_threads_neither_fail_nor_stop_the_engine() -> None:
    with ThreadedEngine(fake_engine(drafter=NGramDrafter, max_num_seqs=4)) as engine:
        metrics = Metrics(engine)
        failures: list[BaseException] = []
        done = threading.Event()

        def scrape() -> None:
            try:
                while not done.is_set():
                    families(metrics)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=scrape) for _ in range(3)]
        for thread in threads:
            thread.start()
        replies = engine.generate([[i, i + 1] for i in range(40)], SamplingParams(max_tokens=60))
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        tokens = sum(reply.usage.completion_tokens for reply in replies)
        assert value(metrics, "slipstream:generation_tokens_total") == tokens


def test_a_scrape_does_not_wait_for_a_step() -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        go_on.wait(30)

    with ThreadedEngine(fake_engine(drafter=NGramDrafter, after_forward=hang)) as engine:
        engine.submit(PROMPT, SamplingParams(max_tokens=3), lambda item: None)
        assert stuck.wait(30)
        assert value(Metrics(engine), "slipstream:num_requests_running") == 1
        go_on.set()


def test_every_metric_is_documented_with_its_type_and_nothing_else_is() -> None:
    documented = dict(
        re.findall(r"^\| `(slipstream:\w+)`[^|]*\| (\w+) \|", DOCS.read_text("utf-8"), re.M)
    )
    exposed = {}
    for family in families(Metrics(drafting_engine())).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exposed[name] = family.type
    assert documented == exposed
