"""The page at `/` in a real browser: in every state, at every width, in both colour schemes."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server's extra is not installed")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

from slipstream.server import dashboard
from slipstream.server.speculation import explain
from slipstream.types import SamplingParams
from tests.fake_model import fake_engine
from tests.machine import PROMPT, Machine, engine_on, flat, perfect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# No network, no sandbox (tests may run as root), no screen.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP = ViewportSize(width=1280, height=900)
PHONE = ViewportSize(width=390, height=844)
KEY = "a key, of any kind"
PATIENCE_MS = 10_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")


class Site:
    """A server of the page whose answers a test decides."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.key: str | None = None
        self.status = 200
        self.model = "a-model"
        self.asked = 0
        app = FastAPI()
        app.get("/", response_class=HTMLResponse)(self.page)
        app.get("/v1/speculation")(self.speculation)
        app.get("/v1/models")(self.models)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        config = uvicorn.Config(app, port=port, log_level="warning", ws="none", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def page(self) -> Response:
        return HTMLResponse(dashboard.page(), headers=dashboard.headers())

    def speculation(self, request: Request) -> Response:
        self.asked += 1
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        if self.status != 200:
            return JSONResponse({"error": {"message": "the engine is stuck"}}, self.status)
        return JSONResponse(self.said)

    def models(self) -> Response:
        return JSONResponse({"data": [{"id": self.model}]})

    def __enter__(self) -> Site:
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as opened:
        opened.said = busy()
        yield opened


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(browser: Browser, complaints: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP)
    opened = watched(context.new_page(), complaints)
    yield opened
    context.close()
    assert complaints == []


@pytest.fixture
def tolerant(page: Page, complaints: list[str]) -> Iterator[None]:
    """Forget what was complained about: the test provokes it."""
    yield
    complaints.clear()


def watched(page: Page, complaints: list[str]) -> Page:
    """Have whatever the browser complains about noted: errors, refused resources, broken rules."""
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def note(message: ConsoleMessage) -> None:
        provoked = "Failed to load resource" in message.text
        if message.type in ("error", "warning") and not provoked:
            complaints.append(message.text)

    page.on("console", note)
    return page


def busy() -> dict[str, Any]:
    """Return what an engine says that speculates."""
    engine = engine_on(Machine(flat), perfect(is_wrong=lambda n, place: place > n % 4))
    engine.submit(PROMPT, SamplingParams(max_tokens=140))
    for _ in range(25):
        engine.step()
    said = explain(engine)
    assert (said["verdict"], said["requests"]["running"]) == ("enable", 1)
    return said


def fresh() -> dict[str, Any]:
    """Return what an engine says before its first request."""
    return explain(engine_on(Machine(flat), perfect()))


def off() -> dict[str, Any]:
    """Return what an engine says that has no drafter."""
    engine = fake_engine()
    engine.generate([PROMPT], SamplingParams(max_tokens=5))
    return explain(engine)


def crowd() -> dict[str, Any]:
    """Return what an engine says that serves a full batch."""
    engine = engine_on(Machine(flat), perfect(), timed=range(1, 65), max_num_seqs=8)
    for _ in range(11):
        engine.submit(PROMPT, SamplingParams(max_tokens=120))
    for _ in range(10):
        engine.step()
    return explain(engine)


def later(said: dict[str, Any], **totals: float) -> dict[str, Any]:
    """Return the same with some totals grown."""
    grown = copy.deepcopy(said)
    for name, by in totals.items():
        grown["totals"][name] += by
    return grown


def test_the_page_asks_nothing_of_anybody_else(page: Page, site: Site) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    expect(page.locator("#model")).to_have_text("a-model")
    assert {url for url in asked if not url.startswith("data:")} == {
        site.url,
        f"{site.url}v1/speculation",
        f"{site.url}v1/models",
    }
    html = dashboard.page()
    assert re.findall(r"https?://[\w.]+", html.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"'](?!data:)", html)
    assert " style=" not in html  # the policy would refuse it
    assert not re.search(r"\son\w+=", html)


@pytest.mark.usefixtures("tolerant")
def test_nothing_but_its_own_script_and_style_runs(page: Page, site: Site) -> None:
    rules = dashboard.headers()["Content-Security-Policy"]
    assert "unsafe" not in rules
    assert rules.startswith("default-src 'none'; ")
    page.goto(site.url)
    expect(page.locator("#verdict")).to_have_text("Speculating")  # its own does
    refused = page.evaluate(
        """() => new Promise((done) => {
          document.addEventListener("securitypolicyviolation",
            (event) => done(event.violatedDirective));
          const added = document.createElement("script");
          added.textContent = "window.broken = true";
          document.body.append(added);
        })"""
    )
    assert refused.startswith("script-src")
    assert page.evaluate("window.broken") is None


def test_it_says_what_was_decided_and_why(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#verdict")).to_have_text("Speculating")
    expect(page.locator("#reason")).to_contain_text(re.compile(r"A round of [\d.]+ ms yields"))
    (k,) = site.said["widths"]
    expect(page.locator("#width")).to_have_text(f"k = {k}")
    expect(page.locator("#cost .bar-live")).to_have_count(1)
    expect(page.locator("#cost .strong")).to_have_text(str(k))
    expect(page.locator("#cost-note")).to_contain_text(f"{k} drafted: ")
    assert page.locator("#cost .worth").count() > 10
    assert page.locator("#acceptance .dot").count() == 15


def test_live_figures_are_of_the_last_seconds(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#live")).to_have_text("–")
    site.said = later(
        site.said, generation_tokens=400, step_s=2.0, decode_s=1.5, decode_classic_s=3.0, steps=90
    )
    expect(page.locator("#live")).to_have_text("200")
    expect(page.locator("#classic")).to_have_text("114")
    expect(page.locator("#gain")).to_have_text("1.75×")
    expect(page.locator("#speed svg")).to_have_attribute("aria-label", re.compile("now 200"))
    # What is over is not live.
    expect(page.locator("#live")).to_have_text("–")


def test_no_classic_rate_is_claimed_where_none_is_known(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    site.said = later(site.said, generation_tokens=100, step_s=1.0, steps=50)
    expect(page.locator("#live")).to_have_text("100")
    expect(page.locator("#classic")).to_have_text("–")
    expect(page.locator("#gain")).to_have_text("–")


def test_another_process_starts_a_new_history(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    site.said = later(site.said, generation_tokens=400, step_s=2.0, steps=90)
    expect(page.locator("#live")).to_have_text("200")
    site.said = fresh()
    expect(page.locator("#verdict")).to_have_text("Nothing has run yet")
    expect(page.locator("#live")).to_have_text("–")
    expect(page.locator("#speed svg")).to_have_attribute(
        "aria-label", re.compile("Nothing has run")
    )


STATES = [
    (fresh, "Nothing has run yet", "Idle"),
    (off, "Speculation is off", "Idle"),
    (crowd, "Speculating", "Live"),
]


@pytest.mark.parametrize(("state", "verdict", "link"), STATES)
def test_every_state_has_words(page: Page, site: Site, state: Any, verdict: str, link: str) -> None:
    site.said = state()
    page.goto(site.url)
    expect(page.locator("#verdict")).to_have_text(verdict)
    expect(page.locator("#link")).to_have_text(link)
    assert page.locator("#reason").inner_text().endswith(".")
    assert page.locator("#cost svg").count() == 1


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        (
            {"verdict": "decline", "reason": "decline: the loss budget is spent: 9 are owed"},
            "Not speculating",
            "The loss budget is spent: 9 are owed.",
        ),
        (
            {"verdict": "fixed", "mode": "fixed:4", "reason": "fixed: k = 4 was asked for"},
            "Drafting 4, as asked",
            "K = 4 was asked for.",
        ),
        (
            {"verdict": "unmeasured", "reason": "unmeasured: no verify was timed yet"},
            "Measuring",
            "No verify was timed yet.",
        ),
    ],
)
def test_every_verdict_has_words(
    page: Page, site: Site, changes: dict[str, str], verdict: str, reason: str
) -> None:
    site.said |= changes
    page.goto(site.url)
    expect(page.locator("#verdict")).to_have_text(verdict)
    expect(page.locator("#reason")).to_have_text(re.compile(re.escape(reason), re.I))


def test_debt_beyond_the_capacity_is_marked_by_more_than_colour(page: Page, site: Site) -> None:
    site.said["budget"] |= {"debt_ms": 90.0, "capacity_ms": 80.0}
    page.goto(site.url)
    expect(page.locator("#debt")).to_have_text("90.0 ms")
    meter = page.get_by_role("meter", name="Share of the loss budget that is owed")
    expect(meter).to_have_attribute("aria-valuenow", "100")
    expect(meter).to_have_attribute("data-full", "true")
    assert "gradient" in meter.locator("i").evaluate("bar => getComputedStyle(bar).backgroundImage")


@pytest.mark.parametrize(("batch", "whose"), [(1, "a request"), (8, "8 requests")])
def test_debt_is_shown_against_what_so_many_requests_may_owe(
    page: Page, site: Site, batch: int, whose: str
) -> None:
    site.said["budget"] |= {"debt_ms": 90.0, "capacity_ms": 80.0, "capacity_batch": batch}
    page.goto(site.url)
    expect(page.locator("#budget-title")).to_have_text(
        "Loss budget of 8 requests" if batch > 1 else "Loss budget"
    )
    expect(page.locator("#won")).to_have_text(
        f"More than {whose} may owe: nothing drafts until it is paid."
    )
    site.said["budget"]["debt_ms"] = 70.0
    expect(page.locator("#won")).to_contain_text("against classic decoding")


def test_times_of_widths_that_no_longer_run_are_shown_as_old(page: Page, site: Site) -> None:
    (k,) = site.said["widths"]
    for entry in site.said["costs"]:
        entry["age_steps"] = {1: 5, 2: 600, k: 700}.get(entry["drafted"])
    page.goto(site.url)
    titles = page.locator("#cost g.col")
    expect(titles.nth(1).locator("title")).to_contain_text("(last run 5 steps ago)")
    expect(titles.nth(1).locator(".bar-soft")).to_have_count(1)
    expect(titles.nth(2).locator("title")).to_contain_text("(last run 600 steps ago)")
    expect(titles.nth(2).locator(".bar-old")).to_have_count(1)
    expect(titles.nth(15).locator("title")).to_contain_text("(timed before the start)")
    expect(titles.nth(15).locator(".bar-old")).to_have_count(1)
    expect(titles.nth(k).locator(".bar-live")).to_have_count(1)  # what is chosen is marked as such


def test_sources_that_are_asked_together_have_their_time_and_no_tokens(
    page: Page, site: Site
) -> None:
    site.said["sources"] = {
        "grammar": {"drafted": 8, "accepted": 8, "draft_ms": 0.0},
        "grammar+ngram": {"drafted": 0, "accepted": 0, "draft_ms": 1500.0},
        "ngram": {"drafted": 30, "accepted": 12, "draft_ms": 500.0},
        "prediction": {"drafted": 0, "accepted": 0, "draft_ms": 20.0},
    }
    page.goto(site.url)
    rows = page.locator("#sources tr")
    expect(rows).to_have_count(4)
    spaced = [re.sub(r"\s+", " ", text) for text in rows.all_inner_texts()]
    assert spaced == [
        "grammar 100 % of 8 accepted in 0.00 s",
        "grammar+ngram asked together in 1.50 s",
        "ngram 40 % of 30 accepted in 0.50 s",
        "prediction none drafted in 0.02 s",
    ]


def test_a_server_that_is_gone_is_said_and_found_again(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    page.route("**/v1/speculation", lambda route: route.abort())
    expect(page.locator("#link")).to_contain_text("The server does not answer, last seen")
    expect(page.locator("#main")).to_have_attribute("data-stale", "true")
    expect(page.locator("#verdict")).to_have_text("Speculating")  # what was last known stays
    page.unroute("**/v1/speculation")
    expect(page.locator("#link")).to_have_text("Live")
    expect(page.locator("#main")).to_have_attribute("data-stale", "false")


def test_what_the_server_answers_instead_is_shown(page: Page, site: Site) -> None:
    site.status = 503
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("the engine is stuck")
    site.status = 200
    expect(page.locator("#link")).to_have_text("Live")


def test_a_page_of_another_version_says_so(page: Page, site: Site) -> None:
    site.said["schema"] = 2
    page.goto(site.url)
    expect(page.locator("#link")).to_contain_text("reload the page")


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(page: Page, site: Site) -> None:
    site.key = KEY
    page.goto(site.url)
    field = page.get_by_label("Key", exact=True)
    expect(field).to_be_focused()
    asked = site.asked
    field.fill("wrong")
    field.press("Enter")
    expect(page.locator("#ask-text")).to_contain_text("refused this key")
    field.fill(KEY)
    page.get_by_role("button").click()
    expect(page.locator("#link")).to_have_text("Live")
    assert site.asked >= asked + 2
    page.reload()
    expect(page.locator("#link")).to_have_text("Live")
    assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]


def test_names_are_text_and_never_markup(page: Page, site: Site) -> None:
    evil = "<img src=x onerror=alert(1)>"
    site.model = evil
    site.said["reason"] = f"enable: {evil}"
    site.said["profile"] = evil
    site.said["sources"] = {evil: {"drafted": 1, "accepted": 1, "draft_ms": 1.0}}
    site.said["undrafted"] = {evil: 3}
    page.goto(site.url)
    expect(page.locator("#model")).to_have_text(evil)
    expect(page.locator("#reason")).to_contain_text(evil)
    assert page.locator("img").count() == 0


def test_a_page_that_nobody_sees_asks_for_nothing(page: Page, site: Site) -> None:
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.wait_for_timeout(1500)  # the poll that was due has gone
    asked = site.asked
    page.wait_for_timeout(2500)
    assert site.asked == asked
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.wait_for_timeout(1500)
    assert site.asked > asked


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_moves_when_numbers_come(page: Page, site: Site, viewport: ViewportSize) -> None:
    page.set_viewport_size(viewport)
    boxes = """() => [...document.querySelectorAll(".card, .chart")].map((card) => {
      const box = card.getBoundingClientRect();
      return [box.left, box.top + scrollY, box.width, box.height].map(Math.round);
    })"""
    seen = []
    page.route("**/v1/speculation", lambda route: route.abort())
    page.goto(site.url)
    expect(page.locator("#link")).to_contain_text("does not answer")
    seen.append(page.evaluate(boxes))
    page.unroute("**/v1/speculation")
    for state, verdict, _ in STATES:
        site.said = state()
        expect(page.locator("#verdict")).to_have_text(verdict)
        page.wait_for_timeout(50)
        seen.append(page.evaluate(boxes))
    site.said = later(busy(), generation_tokens=12345, step_s=9.0, decode_s=5, decode_classic_s=99)
    expect(page.locator("#finished")).to_have_text("0")
    page.wait_for_timeout(1500)
    seen.append(page.evaluate(boxes))
    assert all(each == seen[0] for each in seen), seen


@pytest.mark.parametrize("width", [320, 390, 600, 768, 960, 1280, 1920])
def test_nothing_runs_out_of_the_page(page: Page, site: Site, width: int) -> None:
    page.set_viewport_size(ViewportSize(width=width, height=800))
    site.said = crowd()
    site.said["profile"] = "new: kept in /home/somebody/.cache/slipstream/profiles/" + 64 * "0"
    site.said["reason"] = "decline: " + 120 * "x"
    site.model = "a-model-with-a-name-that-is-longer-than-any-telephone-is-wide-q4_k_m"
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """() => [...document.querySelectorAll("main *")].filter((each) => {
      const card = each.closest(".card").getBoundingClientRect();
      const box = each.getBoundingClientRect();
      return box.width && (box.right > card.right + 1 || box.left < card.left - 1);
    }).map((each) => each.outerHTML.slice(0, 120))"""
    assert page.evaluate(outside) == []


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("state", [busy, crowd])
def test_labels_of_an_axis_keep_their_distance(
    page: Page, site: Site, width: int, state: Any
) -> None:
    page.set_viewport_size(ViewportSize(width=width, height=800))
    site.said = state()
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    for chart in ("cost", "recent", "acceptance"):
        spans = page.evaluate(
            """(chart) => [...document.querySelectorAll(`#${chart} text[text-anchor=middle]`)]
              .filter((label) => label.textContent).map((label) => {
                const box = label.getBoundingClientRect();
                return [Math.round(box.top), box.left, box.right];
              })""",
            chart,
        )
        lowest = max(top for top, _, _ in spans)
        axis = sorted((left, right) for top, left, right in spans if top == lowest)
        assert len(axis) >= 5
        for (_, end), (start, _) in itertools.pairwise(axis):
            assert start - end >= 4, (chart, axis)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(browser: Browser, site: Site, scheme: Any) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)
    page = watched(context.new_page(), [])
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    colours = page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
          const names = ["page", "card", "text", "muted", "live", "warn", "classic", "soft"];
          const value = (name) => style.getPropertyValue(`--${name}`).trim();
          return Object.fromEntries(names.map((name) => [name, value(name)])); }"""
    )
    dark = luminance(colours["page"]) < 0.1
    assert dark is (scheme == "dark")
    for text in ("text", "muted", "warn", "live"):
        assert contrast(colours[text], colours["card"]) >= 4.5, text
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    # Lines and marks, and what is chosen beside what is not, differ in brightness, not hue alone.
    assert contrast(colours["classic"], colours["card"]) >= 3
    assert contrast(colours["live"], colours["soft"]) >= 2.2
    context.close()


def test_everything_has_a_name_for_who_cannot_see_it(page: Page, site: Site) -> None:
    site.said = crowd()
    page.goto(site.url)
    expect(page.locator("#link")).to_have_text("Live")
    for drawing in page.locator("main svg").all():
        assert len(drawing.get_attribute("aria-label") or "") > 10
        assert drawing.get_attribute("role") == "img"
    for section in page.locator("section").all():
        label = section.get_attribute("aria-labelledby")
        assert page.locator(f"#{label}").inner_text()
    for column in page.locator("#cost g.col title").all():
        assert column.text_content()
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("heading", level=1).count() == 1


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2), 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
