"""Metrics, explanation and dashboard on the real server: what requests leave behind there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed")
pytest.importorskip("fastapi", reason="the server's packages are not installed")

from prometheus_client.parser import text_string_to_metric_families

from slipstream.drafters.ngram import NGramDrafter
from slipstream.server import dashboard
from tests.fake_model import fake_engine
from tests.server.inside import Inside, inside

KEY = "observer"
AUTH = {"Authorization": f"Bearer {KEY}"}
PATIENCE_MS = 15_000


@pytest.fixture
def served() -> Iterator[Inside]:
    engine = fake_engine(drafter=NGramDrafter, clock=time.perf_counter, max_num_seqs=2)
    with inside(engine, api_key=KEY) as server:
        yield server


def complete(server: Inside, **fields: object) -> int:
    body = {"prompt": "abcabc", "max_tokens": 20} | fields
    return server.ask("POST", "/v1/completions", body, AUTH).status


def samples(server: Inside) -> dict[tuple[str, tuple[str, ...]], float]:
    reply = server.ask("GET", "/metrics", headers=AUTH)
    assert reply.status == 200
    return {
        (sample.name.removeprefix("slipstream:"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.body.decode("utf-8"))
        for sample in family.samples
    }


def test_requests_leave_their_counts(served: Inside) -> None:
    assert [complete(served), complete(served, n=2), complete(served, max_tokens=1)] == [200] * 3
    assert complete(served, speculation={"mode": "off"}) == 200
    assert complete(served, temperature=-1) == 400
    found = samples(served)
    assert found["requests_received_total", ()] == 5
    assert found["requests_started_total", ("auto",)] == 4
    assert found["requests_started_total", ("off",)] == 1
    assert found["requests_finished_total", ("length",)] == 5
    assert found["requests_rejected_total", ("400",)] == 1
    assert found["time_to_first_token_seconds_count", ()] == 5
    assert found["generation_tokens_total", ()] == 4 * 20 + 1
    assert found["inter_token_latency_seconds_count", ()] == 4 * 19
    assert found["num_requests_running", ()] == found["kv_pages_used", ()] == 0
    assert found["spec_decode_undrafted_rounds_total", ("off",)] == 19


def test_the_explanation_agrees_with_the_metrics(served: Inside) -> None:
    assert complete(served, max_tokens=60) == 200
    said = served.ask("GET", "/v1/speculation", headers=AUTH).value
    found = samples(served)
    assert said["totals"]["generation_tokens"] == found["generation_tokens_total", ()] == 60
    drafted = sum(each["drafted"] for each in said["acceptance"])
    assert drafted == found["spec_decode_num_draft_tokens_total", ()]
    for cause, count in said["undrafted"].items():
        assert count == found["spec_decode_undrafted_rounds_total", (cause,)]


def test_the_page_is_open_and_its_numbers_are_not(served: Inside) -> None:
    reply = served.ask("GET", "/")
    assert (reply.status, reply.body.decode("utf-8")) == (200, dashboard.page())
    headers = {name.lower(): value for name, value in reply.headers.items()}
    for name, value in dashboard.headers().items():
        assert headers[name.lower()] == value
    assert served.ask("GET", "/v1/speculation").status == 401


def test_the_page_shows_the_real_server(served: Inside) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Debian's chromium is not installed")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    complaints: list[str] = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, headless=True, args=arguments)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        sync_api.expect.set_options(timeout=PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.get_by_role("button").click()
        sync_api.expect(page.locator("#verdict")).to_have_text("Nothing has run yet")
        sync_api.expect(page.locator("#model")).to_have_text("fake")
        assert complete(served, max_tokens=100) == 200
        sync_api.expect(page.locator("#finished")).to_have_text("1")
        sync_api.expect(page.locator("#live")).not_to_have_text("–")
        browser.close()
    assert complaints == []
