"""What `GET /v1/speculation` answers: why it is speculating, or why not."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the server's extra is not installed")

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.causes import CAUSES
from slipstream.engine.engine import Engine
from slipstream.engine.threaded import ThreadedEngine
from slipstream.errors import SlipstreamError
from slipstream.server.speculation import explain
from slipstream.types import MAX_K, SamplingParams
from tests.fake_model import always_wrong, fake_engine
from tests.machine import (
    COUNT,
    PROMPT,
    SCRIPT,
    STEP_S,
    Machine,
    engine_on,
    flat,
    one,
    per_row,
    perfect,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def running(engine: Engine, steps: int = 30, count: int = 1) -> dict[str, Any]:
    """Return what is said after some steps of requests that still run, all learned from."""
    for _ in range(count):
        engine.submit(PROMPT, SamplingParams(max_tokens=COUNT))
    for _ in range(steps):
        engine.step()
    assert len(engine.running) == count
    if engine.policy is not None:
        engine.policy.learn()  # it learns from several steps together
    return explain(engine)


def test_it_says_that_drafting_pays_and_by_how_much() -> None:
    said = running(engine_on(Machine(flat), perfect()), steps=12)
    assert said["verdict"] == "enable"
    assert re.match(r"enable: a round of [\d.]+ ms yields [\d.]+ tokens; classic", said["reason"])
    (k,) = said["widths"]
    assert k > 0
    best = said["costs"][k]
    assert best["speedup"] == pytest.approx(said["predicted_speedup"], rel=0.02)
    assert best["round_ms"] == pytest.approx(1e3 * flat(k + 1), rel=0.02)
    assert best["classic_ms"] > best["round_ms"]


def test_it_says_why_it_does_not_draft() -> None:
    said = running(engine_on(Machine(per_row), perfect(is_wrong=always_wrong)))
    assert said["verdict"] == "decline"
    assert said["reason"].startswith("decline: a round of ")
    assert said["widths"] == [0]
    assert said["undrafted"]["does_not_pay"] > 10
    assert all(entry["speedup"] < 1 for entry in said["costs"][1:])


def test_a_spent_budget_is_said() -> None:
    engine = engine_on(Machine(flat), perfect())
    running(engine, steps=10)
    assert engine.policy is not None
    engine.policy.ledger.debt_s = 100 * STEP_S
    said = explain(engine)
    assert said["verdict"] == "decline"
    assert "the loss budget is spent" in said["reason"]
    assert said["budget"]["debt_ms"] == pytest.approx(1e3 * 100 * STEP_S)
    assert said["budget"]["capacity_ms"] == pytest.approx(1e3 * 8 * STEP_S, rel=0.05)


def test_before_anything_ran_it_is_unmeasured() -> None:
    said = explain(engine_on(Machine(flat), perfect()))
    assert said["verdict"] == "unmeasured"
    assert said["costs"][0]["round_ms"] is None
    assert said["costs"][1]["round_ms"] is not None  # timed at load
    assert said["budget"]["capacity_ms"] is None


def test_an_idle_engine_says_what_the_next_request_would_get() -> None:
    engine = engine_on(Machine(flat), perfect())
    one(engine)
    said = explain(engine)
    assert said["requests"]["running"] == 0
    assert said["verdict"] == "enable"
    assert said["batch"] == 1


def test_nothing_to_offer_is_no_judgement_of_cost() -> None:
    engine = engine_on(Machine(flat), perfect(free=True, width=0))
    said = running(engine)
    assert (said["verdict"], said["reason"]) == (
        "decline",
        "decline: the drafter found nothing to offer",
    )
    assert said["undrafted"]["nothing_offered"] > 10


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"k": "off", "drafter": NGramDrafter}, "off: no drafting was asked for"),
        ({"k": 0, "drafter": NGramDrafter}, "off: no drafting was asked for"),
        ({}, "off: there is no drafter"),
    ],
)
def test_off_says_who_switched_it_off(settings: dict[str, Any], reason: str) -> None:
    engine = fake_engine(**settings)
    engine.generate([PROMPT], SamplingParams(max_tokens=5))
    said = explain(engine)
    assert (said["verdict"], said["reason"]) == ("off", reason)
    assert (said["costs"], said["budget"], said["ceiling"]) == ([], None, 0)


def test_a_fixed_width_is_said_with_its_numbers() -> None:
    said = running(engine_on(Machine(flat), perfect(), k=4))
    assert (said["mode"], said["verdict"]) == ("fixed:4", "fixed")
    assert said["recent"]["k_histogram"][4] > 10


def test_a_batch_is_judged_as_a_batch() -> None:
    engine = engine_on(Machine(flat), perfect(), timed=range(1, 65), max_num_seqs=4)
    said = running(engine, steps=12, count=4)
    assert said["batch"] == 4
    assert len(said["widths"]) == 4
    drafted = sum(said["widths"])
    assert drafted > 4
    (entry,) = [each for each in said["costs"] if each["drafted"] == drafted]
    assert entry["rows"] == drafted + 4
    assert len(said["costs"]) < 40
    assert entry["round_ms"] == pytest.approx(1e3 * flat(drafted + 4), rel=0.05)
    assert entry["speedup"] == pytest.approx(said["predicted_speedup"], rel=0.02)
    assert said["costs"][0]["round_ms"] == pytest.approx(1e3 * flat(4), rel=0.05)
    assert said["requests"] == {
        "running": 4,
        "waiting": 0,
        "finished": 0,
        "cancelled": 0,
        "dropped": 0,
    }


def test_counts_are_those_of_the_replies() -> None:
    engine = engine_on(Machine(flat), perfect(is_wrong=lambda number, place: place > number % 3))
    reports = [one(engine).speculation for _ in range(3)]
    said = explain(engine)
    drafted = sum(report.drafted for report in reports)
    accepted = sum(report.accepted for report in reports)
    assert sum(entry["drafted"] for entry in said["acceptance"]) == drafted
    assert sum(entry["accepted"] for entry in said["acceptance"]) == accepted
    assert (said["sources"]["scripted"]["drafted"], said["sources"]["scripted"]["accepted"]) == (
        drafted,
        accepted,
    )
    assert said["requests"]["finished"] == 3
    assert said["totals"]["generation_tokens"] == 3 * COUNT
    assert sum(said["recent"]["k_histogram"]) == said["recent"]["rounds"]
    assert said["totals"]["decode_classic_s"] > said["totals"]["decode_s"] > 0


def test_times_have_the_age_of_their_row_counts() -> None:
    engine = engine_on(Machine(flat), perfect())
    assert {each["age_steps"] for each in explain(engine)["costs"]} == {None}  # timed at load
    said = running(engine, steps=12)
    ages = {each["drafted"]: each["age_steps"] for each in said["costs"]}
    histogram = said["recent"]["k_histogram"]
    drafted = [ages[each] for each in range(1, 16) if histogram[each]]
    assert drafted
    assert None not in drafted
    assert min(drafted) == 0
    assert ages[0] is not None
    assert 0 < ages[0] < 12
    never = [each for each in range(1, 16) if not histogram[each]]
    assert never
    assert {ages[each] for each in never} == {None}


def test_capacity_counts_in_steps_of_the_batch_that_it_names() -> None:
    engine = engine_on(Machine(flat), perfect(), timed=range(1, 65), max_num_seqs=4)
    budget = running(engine, steps=12, count=4)["budget"]
    assert budget["capacity_batch"] == 4
    assert budget["capacity_ms"] == pytest.approx(1e3 * 8 * flat(4), rel=0.05)
    while engine.num_requests:
        engine.step()
    assert explain(engine)["budget"]["capacity_batch"] == 1


def test_several_sources_have_their_own_counts_and_a_time_together() -> None:
    machine = Machine(flat)
    lookup = perfect(free=True, on_propose=lambda: machine.wait(STEP_S / 100))
    engine = engine_on(machine, lookup)
    prediction = "".join(f"<{token}>" for token in SCRIPT[:40])
    engine.generate([PROMPT], SamplingParams(max_tokens=60, prediction=prediction))
    said = explain(engine)
    assert {"prediction+scripted", "scripted"} <= set(said["sources"])
    together = said["sources"]["prediction+scripted"]
    assert (together["drafted"], together["accepted"]) == (0, 0)
    own = [each for name, each in said["sources"].items() if "+" not in name]
    drafted = sum(each["drafted"] for each in said["acceptance"])
    assert sum(each["drafted"] for each in own) == drafted > 0


def test_a_source_that_did_nothing_is_no_source() -> None:
    engine = engine_on(Machine(flat), perfect())
    one(engine)
    engine.stats.rounds.outcomes["idle", 0, 0] = 3
    engine.stats.rounds.draft_s |= {"resting": 0.0, "slow": 0.5}
    assert set(explain(engine)["sources"]) == {"scripted", "slow"}


def test_asking_changes_nothing() -> None:
    replies = []
    for asks in (False, True):
        engine = engine_on(Machine(flat), perfect(is_wrong=lambda n, place: (n + place) % 3 == 2))
        engine.submit(PROMPT, SamplingParams(max_tokens=COUNT))
        reply = None
        while engine.num_requests:
            for output in engine.step():
                reply = output.chunk.reply
            if asks:
                explain(engine)
        assert reply is not None
        replies.append(reply.speculation)
    assert replies[0] == replies[1]


def test_it_is_plain_json_with_the_documented_fields() -> None:
    said = running(engine_on(Machine(flat), perfect()), steps=12)
    json.dumps(said, allow_nan=False)
    page = DOCS.read_text("utf-8").split("## Speculation, explained")[1].split("### Reading")[0]
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.M))
    assert documented == set(paths(said))
    for cause in CAUSES:
        assert f"`{cause}`" in DOCS.read_text("utf-8")


def paths(said: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the paths of all leaves; lists of objects as name[], maps with open keys as one."""
    found = []
    for key, value in said.items():
        path = prefix + key
        if path in ("undrafted", "requests") or not isinstance(value, dict | list):
            found.append(path)
        elif isinstance(value, list):
            of_objects = value and isinstance(value[0], dict)
            found += paths(value[0], f"{path}[].") if of_objects else [path]
        elif path == "sources":
            found += paths(next(iter(value.values())), "sources.NAME.")
        else:
            found += paths(value, f"{path}.")
    return found


def test_a_running_engine_is_read_between_steps() -> None:
    slow = fake_engine(
        drafter=NGramDrafter,
        max_num_seqs=4,
        clock=time.perf_counter,
        after_forward=lambda: time.sleep(0.0005),
    )
    with ThreadedEngine(slow) as engine:
        done = threading.Event()
        said: list[dict[str, Any]] = []

        def ask() -> None:
            while not done.is_set():
                said.append(explain(engine))

        thread = threading.Thread(target=ask)
        thread.start()
        engine.generate([[i, 3] for i in range(12)], SamplingParams(max_tokens=60))
        done.set()
        thread.join()
        assert len(said) > 3
        tokens = [each["totals"]["generation_tokens"] for each in said]
        assert tokens == sorted(tokens)
        for each in said:
            assert sum(each["recent"]["k_histogram"]) == each["recent"]["rounds"]
            assert len(each["acceptance"]) == MAX_K
    assert explain(engine)["requests"]["finished"] == 12


def test_an_engine_that_hangs_is_reported_not_waited_for() -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        go_on.wait(30)

    with ThreadedEngine(fake_engine(after_forward=hang)) as engine:
        engine.submit(PROMPT, SamplingParams(max_tokens=3), lambda item: None)
        assert stuck.wait(30)
        with pytest.raises(SlipstreamError, match=r"one step for more than 0\.05 s"):
            explain(engine, timeout_s=0.05)
        go_on.set()
