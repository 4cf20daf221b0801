"""The simulator: recorded pairings get the verdict that their machines deserved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.policy.replay import judge, load_traces

FILE = Path(__file__).resolve().parents[1] / "data" / "recorded_pairings.json"
TRACES = {trace["name"]: trace for trace in load_traces(FILE)}
EXPECTED_K = {
    "gb10-per-row-gemv": 0,
    "gb10-multirow": 3,
    "gb10-31b-exact": 3,
    "m5max-enumeration": 3,
    "m5max-prose": 3,
    "m5max-code": 4,
    "m3ultra-enumeration": 3,
    "m3ultra-prose": 3,
    "m1ultra-enumeration": 3,
    "m1ultra-prose": 0,
    "m1ultra-qwen27b": 0,
    "vllm-39680": 0,
    "vllm-47277": 0,
    "unsloth-6468": 0,
    "llamacpp-24508": 2,
}
TRACE: dict[str, Any] = {
    "name": "one",
    "classic_ms": 10.0,
    "arms": [{"drafted": 2, "round_ms": 12.0, "accepted_per_round": 1.0}],
}


@pytest.mark.parametrize("name", TRACES)
def test_recorded_pairing_gets_its_verdict(name: str) -> None:
    verdict = judge(TRACES[name])
    assert verdict.verdict == TRACES[name]["expect"]
    assert verdict.k == EXPECTED_K[name]
    assert verdict.margin is not None
    assert (verdict.margin > 0.02) == (verdict.verdict == "enable")
    assert verdict.reason.startswith(f"{verdict.verdict}: a round of ")


def test_kernel_generations_flip_the_verdict_at_equal_acceptance() -> None:
    slow, fast = judge(TRACES["gb10-per-row-gemv"]), judge(TRACES["gb10-multirow"])
    assert slow.margin is not None
    assert slow.margin <= -0.2
    assert [arm.predicted_speedup for arm in slow.arms] == pytest.approx([0.769, 0.524], abs=5e-4)
    assert fast.predicted_speedup == pytest.approx(1.457, abs=5e-4)


def test_measured_arms_are_predicted_within_five_percent() -> None:
    for trace in TRACES.values():
        for arm in judge(trace).arms:
            if not arm.derived and arm.predicted_speedup and arm.measured_speedup:
                assert arm.predicted_speedup == pytest.approx(arm.measured_speedup, rel=0.05)


@pytest.mark.parametrize("field", ["round_ms", "accepted_per_round"])
def test_a_null_in_an_arm_is_unknown(field: str) -> None:
    verdict = judge({**TRACE, "arms": [{**TRACE["arms"][0], field: None}]})
    assert (verdict.verdict, verdict.k, verdict.predicted_speedup) == ("unknown", 0, None)


@pytest.mark.parametrize("change", [{"classic_ms": None}, {"arms": []}, {"arms": None}])
def test_a_trace_that_lacks_something_is_unknown(change: dict[str, Any]) -> None:
    verdict = judge({**TRACE, **change})
    assert verdict.verdict == "unknown"
    assert verdict.margin is None


def test_an_unknown_arm_does_not_hide_one_that_pays() -> None:
    unknown = {"drafted": 4, "round_ms": None, "accepted_per_round": 2.0}
    assert judge({**TRACE, "arms": [*TRACE["arms"], unknown]}).k == 2


def test_single_rounds_are_averaged_by_width() -> None:
    rounds = [
        {"k": 0, "accepted": 0, "round_ms": 9.0},
        {"k": 0, "accepted": 0, "round_ms": 11.0},
        {"k": 2, "accepted": 2, "round_ms": 12.0},
        {"k": 2, "accepted": 0, "round_ms": 12.0},
    ]
    verdict = judge({"name": "rounds", "rounds": rounds})
    assert verdict.k == 2
    assert verdict.predicted_speedup == pytest.approx(2.0 * 10.0 / 12.0, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classic_ms": -1}, "classic_ms must be a number above 0 or null, got -1"),
        ({"classic_ms": True}, "classic_ms must be"),
        ({"arms": 3}, "arms must be a list of objects"),
        ({"arms": [{"drafted": 0}]}, "drafted must be a whole number of 1 or more, got 0"),
        ({"arms": [*TRACE["arms"], *TRACE["arms"]]}, "drafted = 2 is there twice"),
        ({"arms": [{**TRACE["arms"][0], "accepted_per_round": 2.5}]}, "in \\[0, 2\\]"),
        ({"rounds": [{"k": -1}]}, "a round's k"),
    ],
)
def test_impossible_values_are_errors_that_name_the_field(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        judge({**TRACE, **change})


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema":1,"traces":[1]}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "traces.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"traces\.json"):
        load_traces(path)


def test_command_prints_one_json_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(FILE), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert [verdict["name"] for verdict in verdicts] == list(TRACES)
    assert set(verdicts[0]) == {
        "name",
        "verdict",
        "k",
        "predicted_speedup",
        "margin",
        "reason",
        "arms",
    }


def test_command_prints_a_line_for_each_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(FILE)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TRACES)
    assert "decline: a round of 140.0 ms yields 1.56 tokens" in lines[0]


def test_command_refuses_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.json"]) == 2
    assert "cannot read nowhere.json" in capsys.readouterr().err
