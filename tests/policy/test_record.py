"""Recorded traces: what goes in, and what is counted and left out."""

from __future__ import annotations

import json

import pytest

from slipstream.policy import record
from tests.policy.worlds import outcome, step_outcome


def test_a_trace_is_bounded_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_ROUNDS", 3)
    recorder = record.TraceRecorder("long")
    for _ in range(5):
        recorder.observe(step_outcome([outcome(0, 0, 0.001)], 0.001))
    recorder.observe(step_outcome([outcome(0, 0, 0.001, request=i) for i in (0, 1)], 0.001))
    (trace,) = json.loads(recorder.as_json())["traces"]
    assert len(trace["rounds"]) == 3
    assert (trace["num_late_rounds"], trace["num_shared_steps"]) == (2, 1)
