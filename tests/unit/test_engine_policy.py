"""The policy in the live engine, on a clock that the fake model's forwards move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.drafters.ngram import NGramDrafter
from slipstream.policy.base import Expected, StepOutcome
from slipstream.policy.quiet import MAX_QUIET
from slipstream.policy.record import TraceRecorder
from slipstream.types import KSetting, SamplingParams
from tests.fake_model import Scripted, always_wrong, continuation, forwards
from tests.machine import (
    COUNT,
    PROMPT,
    STEP_S,
    TEXT,
    Machine,
    engine_on,
    flat,
    one,
    per_row,
    perfect,
)


@pytest.mark.parametrize("free", [False, True])
def test_a_cheap_verify_of_a_good_drafter_is_used_after_three_classic_steps(free: bool) -> None:
    machine = Machine(flat)
    report = one(engine_on(machine, perfect(free=free))).speculation
    assert report.verdict == "enable"
    assert report.classic_rounds <= 5
    assert report.predicted_speedup is not None
    assert report.predicted_speedup > 2
    assert report.reason.startswith("enable: a round of ")


def test_a_verify_that_costs_its_rows_is_declined_and_no_slower() -> None:
    machine = Machine(per_row)
    engine = engine_on(machine, perfect(is_wrong=lambda _round, place: place > 0))
    reply = one(engine)
    classic_s = STEP_S * (COUNT - 1)
    assert reply.speculation.verdict == "decline"
    assert reply.speculation.reason.startswith("decline: a round of ")
    assert reply.timing.decode_s <= 1.01 * classic_s + 8 * STEP_S


def test_a_useless_drafter_costs_no_more_than_the_budget() -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect(is_wrong=always_wrong))
    spent = [one(engine).timing.decode_s for _ in range(8)]
    classic_s = STEP_S * (COUNT - 1)
    assert sum(spent) <= 8 * 1.01 * classic_s + 8 * STEP_S
    assert one(engine).speculation.verdict == "decline"


def test_drafting_time_belongs_to_the_round_that_verifies_it() -> None:
    machine = Machine(flat)
    slow = perfect(on_propose=lambda: machine.wait(0.05))
    engine = engine_on(machine, slow, k=1)
    report = one(engine).speculation
    assert report.draft_ms == pytest.approx(50)
    assert report.verify_ms == pytest.approx(1e3 * flat(2))
    assert report.overhead_ms == pytest.approx(0, abs=1e-6)
    assert engine.policy is not None
    assert engine.policy.cost.drafting.times(1)[1] == pytest.approx(0.05)
    assert engine.policy.cost.verify.time_s(2, 100) == pytest.approx(flat(2))


def test_host_work_between_steps_counts_and_a_pause_does_not() -> None:
    steps: list[StepOutcome] = []
    machine = Machine(flat)
    engine = engine_on(machine, perfect())
    engine.observers.append(steps.append)
    engine.submit(PROMPT, SamplingParams(max_tokens=40, k="off"))
    for number in range(1000):
        engine.step()
        if not engine.num_requests:
            break
        machine.wait(0.002 if number % 2 else 7.0)
    times = [step.round_s for step in steps]
    assert {round(s, 6) for s in times} == {STEP_S, STEP_S + 0.002}


def test_a_pause_of_the_caller_is_no_loss() -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect())
    engine.submit(PROMPT, SamplingParams(max_tokens=COUNT))
    while engine.num_requests:
        engine.step()
        machine.wait(5.0)
    assert engine.policy is not None
    assert engine.policy.ledger.debt_s == 0.0


@pytest.mark.parametrize("free", [False, True])
def test_each_request_of_a_batch_has_the_k_that_it_asked_for(free: bool) -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect(free=free), timed=range(1, 49))
    settings: list[KSetting] = ["auto", 5, "off", 3]
    params = [SamplingParams(max_tokens=COUNT, k=k) for k in settings]
    replies = engine.generate([PROMPT] * 4, params)
    assert all(reply.token_ids == TEXT for reply in replies)
    reports = [reply.speculation for reply in replies]
    assert [report.verdict for report in reports[1:]] == ["fixed", "off", "fixed"]
    assert set(reports[1].k_histogram) <= {"1", "2", "3", "4", "5"}
    assert reports[1].k_histogram["5"] >= 20
    assert reports[2].rounds == 0
    assert reports[3].k_histogram["3"] >= 30
    assert reports[0].rounds > 0


def test_fixed_widths_are_served_before_the_policy_s_where_rows_are_short() -> None:
    machine = Machine(flat)
    engine = engine_on(
        machine, perfect(), timed=range(1, 17), max_num_seqs=2, max_batch_rows=8, prefill_chunk=8
    )
    params = [SamplingParams(max_tokens=COUNT, k=k) for k in ("auto", 6)]
    replies = engine.generate([PROMPT] * 2, params)
    assert all(reply.token_ids == TEXT for reply in replies)
    assert max(len(rows.token_ids) for rows in forwards(engine)) <= 8
    assert replies[1].speculation.k_histogram["6"] >= 15


def test_a_paid_drafter_that_turns_good_is_found_again_by_shadows() -> None:
    """Prose then code in one reply (oMLX 2995, TensorRT-LLM 12905: once off, off for the rest)."""
    count = 4000
    text = [*PROMPT, *continuation(PROMPT, count)]
    machine = Machine(flat)
    turn = 1500
    good = Scripted(text)

    class Turning(Scripted):
        def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
            machine.wait(0.0005 * k)
            offered = good.propose(token_ids, k)
            return offered if len(token_ids) > turn else [(token + 1) % 7 for token in offered]

    engine = engine_on(machine, lambda: Turning(text), max_model_len=8192)
    engine.submit(PROMPT, SamplingParams(max_tokens=count, k="auto"))
    emitted, widths = len(PROMPT), []
    while engine.num_requests:
        for output in engine.step():
            emitted += len(output.chunk.token_ids)
            widths.append((emitted, len(output.chunk.token_ids) - 1))
    before = [gained for at, gained in widths if turn - 500 < at < turn]
    after = [gained for at, gained in widths if at > turn + 600]
    assert sum(before) == 0
    assert sum(after) / len(after) > 3


@pytest.mark.parametrize("k", ["auto", 4])
def test_the_policy_lets_go_of_requests_that_end(k: KSetting) -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect())
    assert engine.policy is not None
    one(engine, k=k)
    ids = [engine.submit(PROMPT, SamplingParams(max_tokens=COUNT, k=k, n=2)) for _ in range(3)]
    for _ in range(12):
        engine.step()
    assert engine.policy.requests
    for request_id in ids:
        engine.cancel(request_id)
    assert not engine.policy.requests


def test_a_step_in_which_nobody_may_draft_is_that_of_an_engine_without_a_drafter() -> None:
    machine = Machine(flat)
    asked: list[int] = []
    engine = engine_on(machine, perfect(free=True, on_propose=lambda: asked.append(1)))
    assert engine.policy is not None
    one(engine, k="off")
    assert not asked
    assert engine.policy.rounds == 0
    assert not engine.policy.requests


def test_steps_that_pass_by_are_accounted_for_like_those_that_are_looked_at() -> None:
    """A drafter with nothing to offer: most steps pass by, and the same time is accounted for."""
    totals = []
    for watched in (False, True):
        machine = Machine(flat)
        engine = engine_on(machine, perfect(free=True, width=0))
        policy = engine.policy
        assert policy is not None
        policy.ledger.debt_s = 0.05
        if watched:
            engine.observers.append(lambda step: None)
        one(engine)
        policy.settle()
        totals.append((policy.rounds, policy.ledger.debt_s, policy.cost.classic.time_s(1, 0)))
    assert totals[0][0] == totals[1][0] == COUNT - 1
    assert totals[0][1:] == pytest.approx(totals[1][1:], rel=0.01)
    assert totals[0][1] < 0.05


def test_at_most_a_few_steps_pass_by_in_a_row() -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect(free=True, width=0))
    assert engine.policy is not None
    seen: list[StepOutcome] = []
    observe_step = engine.policy.observe_step

    def watch(step: StepOutcome) -> Expected:
        seen.append(step)
        return observe_step(step)

    engine.policy.observe_step = watch  # type: ignore[method-assign]
    one(engine)
    assert (COUNT - 1) // (MAX_QUIET + 1) <= len(seen) <= COUNT // 8


def test_a_recorder_sees_every_round(tmp_path: Any) -> None:
    machine = Machine(flat)
    engine = engine_on(machine, perfect())
    recorder = TraceRecorder("tiny")
    engine.observers.append(recorder.observe)
    report = one(engine).speculation
    ks = [entry["k"] for entry in recorder.rounds]
    assert len(ks) == report.rounds + report.classic_rounds
    assert ks.count(0) == report.classic_rounds
    assert sum(entry["accepted"] for entry in recorder.rounds) == report.accepted
    assert recorder.num_shared_steps == 0
    assert all(
        entry["round_ms"] == pytest.approx(1e3 * flat(entry["k"] + 1), rel=1e-3)
        for entry in recorder.rounds
    )


@pytest.mark.parametrize("peek_s", [0.0, 0.01 * STEP_S])
def test_a_free_drafter_rests_while_the_budget_is_owed_unless_the_leak_pays_it(
    peek_s: float,
) -> None:
    machine = Machine(flat)
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        machine.wait(peek_s)

    engine = engine_on(machine, perfect(free=True, on_propose=ask, width=0))
    assert engine.policy is not None
    one(engine, max_tokens=20)
    assert asked
    engine.policy.ledger.debt_s = 7.99 * STEP_S
    one(engine, max_tokens=10)
    asked.clear()
    one(engine, max_tokens=20)
    assert len(asked) == (18 if peek_s == 0.0 else pytest.approx(18 * 0.175, abs=1))
    one(engine, max_tokens=10, k=4)  # who asks for it gets it
    assert asked


def test_ngram_lookup_in_auto_gives_the_classic_text_whatever_it_costs() -> None:
    for cost in (flat, per_row, lambda rows: STEP_S):
        one(engine_on(Machine(cost), NGramDrafter))
