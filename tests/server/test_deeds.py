"""What the server says it did against what it did: counters are the sums of what replies report."""

from __future__ import annotations

import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import PATIENCE_S, ServerProcess, eventually, serving

CLIENTS = 8
WORDS = ("hello", "world", "it", "12", "tail", "hello hello", "world world world")
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "auto"},
    {"mode": "auto", "k": 3},
    {"mode": "off"},
    {"mode": "fixed", "k": 4},
)
PATTERN = "(ab|cd){2,6}x"


@pytest.fixture(scope="module")
def fresh(toy: Path) -> Iterator[ServerProcess]:
    """A server that nothing was asked of yet."""
    with serving(toy, "--served-model-name", "toy") as process:
        yield process


def said_by(server: ServerProcess, fields: dict[str, Any]) -> tuple[list[str], list[Any], Any]:
    """Return texts, reports and usage of a text completion, streamed or not."""
    body = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        raw = reply.read()
    if fields.get("stream"):
        lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
    else:
        events = [json.loads(raw)]
    texts = [""] * fields.get("n", 1)
    reports: list[Any] = []
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
        reports += event.get("slipstream", {}).get("choices", [])
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return texts, reports, usage


def at_once(server: ServerProcess, asked: list[dict[str, Any]]) -> list[Any]:
    """Send requests, eight at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda fields: said_by(server, fields), asked, timeout=PATIENCE_S))


def counted(server: ServerProcess) -> dict[tuple[str, str], float]:
    """Return the counters by name and label."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as reply:
        text = reply.read().decode()
    return {
        (sample.name.removeprefix("slipstream:"), "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def mixed(seed: int, count: int = 60) -> list[dict[str, Any]]:
    """Draw requests of every kind that drafts in another way."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        fields: dict[str, Any] = {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randrange(1, 30))),
            "max_tokens": rng.randrange(1, 120),
            "temperature": rng.choice((0, 0, 0.8)),
            "seed": number,
            "stream": rng.random() < 0.5,
            "n": rng.choice((1, 1, 2)),
            "speculation": rng.choice(MODES),
        }
        if rng.random() < 0.3:
            fields["guided_regex"] = PATTERN
        else:
            fields["ignore_eos"] = rng.random() < 0.5
        asked.append(fields)
    return asked


def test_counters_are_the_sums_of_what_replies_report(fresh: ServerProcess) -> None:
    asked = mixed(1)
    answers = at_once(fresh, asked)
    eventually(fresh.is_idle)
    reports = [each["speculation"] for _, choices, _ in answers for each in choices]
    assert len(reports) == sum(fields["n"] for fields in asked)
    found = counted(fresh)

    def total(key: str) -> int:
        return int(sum(report[key] for report in reports))

    rounds, undrafted = Counter[str](), Counter[str]()
    sources: Counter[tuple[str, str]] = Counter()
    for report in reports:
        rounds.update(report["k_histogram"])
        undrafted.update(report["undrafted"])
        for name, counts in report["sources"].items():
            sources["draft", name] += counts["drafted"]
            sources["accepted", name] += counts["accepted"]
        assert sum(report["undrafted"].values()) == report["classic_rounds"]
    assert rounds.total() > 0
    assert undrafted.total() > 0
    assert {name for (_, name), count in sources.items() if count} >= {"grammar", "ngram"}
    assert found["spec_decode_num_drafts_total", ""] == total("rounds")
    assert found["spec_decode_num_draft_tokens_total", ""] == total("drafted")
    assert found["spec_decode_num_accepted_tokens_total", ""] == total("accepted")
    assert found["spec_decode_rounds_total", "0"] == total("classic_rounds")
    for k in range(1, 16):
        assert found["spec_decode_rounds_total", str(k)] == rounds[str(k)]
    for (name, label), value in found.items():
        if name == "spec_decode_undrafted_rounds_total":
            assert value == undrafted[label], label
        if name == "spec_decode_source_draft_tokens_total":
            assert value == sources["draft", label], label
        if name == "spec_decode_source_accepted_tokens_total":
            assert value == sources["accepted", label], label
    usages = [usage for _, _, usage in answers]
    completion = sum(usage["completion_tokens"] for usage in usages)
    assert found["generation_tokens_total", ""] == completion
    read = [
        fields["n"] * usage["prompt_tokens"] for fields, usage in zip(asked, usages, strict=True)
    ]
    assert found["prompt_tokens_total", ""] == sum(read)
    assert found["requests_received_total", ""] == len(asked)
    started = sum(found["requests_started_total", mode] for mode in ("auto", "off", "fixed"))
    finished = sum(found["requests_finished_total", why] for why in ("stop", "length"))
    assert started == finished == len(reports)
    assert found["time_to_first_token_seconds_count", ""] == len(reports)
    assert found["inter_token_latency_seconds_count", ""] == completion - len(reports)


@pytest.mark.parametrize("sampled", [False, True])
def test_eight_clients_get_the_same_bytes_with_speculation_and_without(
    fresh: ServerProcess, sampled: bool
) -> None:
    asked = [
        fields | ({"temperature": 0.9} if sampled else {"temperature": 0})
        for fields in mixed(2, 40)
    ]
    texts, drafted = [], []
    for mode in MODES:
        answers = at_once(fresh, [fields | {"speculation": mode} for fields in asked])
        texts.append([answer[0] for answer in answers])
        reports = [each["speculation"] for _, choices, _ in answers for each in choices]
        drafted.append(sum(report["drafted"] for report in reports))
    assert all(each == texts[0] for each in texts)
    assert drafted[2] == 0
    assert drafted[3] > 0  # whether auto drafts is the clock's business
