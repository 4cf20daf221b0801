"""What an engine counts of its rounds: sums of its replies, and what classic would have taken."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import slipstream.policy
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.causes import CAUSES, cause_of
from slipstream.engine.engine import Engine
from slipstream.engine.totals import RECENT, RoundTotals, accepted_by_position, by_source
from slipstream.policy.base import StepOutcome
from slipstream.types import MAX_K, Reply, SamplingParams
from tests.fake_model import Scripted, always_wrong, fake_engine
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


def totals_of(engine: Engine) -> RoundTotals:
    return engine.stats.rounds


def outcomes_of(replies: Sequence[Reply]) -> tuple[Counter[str], int, int]:
    """Return rounds by k, drafted and accepted tokens of replies."""
    reports = [reply.speculation for reply in replies]
    histogram: Counter[str] = Counter()
    for report in reports:
        histogram.update(report.k_histogram)
    return histogram, sum(r.drafted for r in reports), sum(r.accepted for r in reports)


@pytest.mark.parametrize("free", [False, True])
def test_totals_are_the_sums_of_the_replies(free: bool) -> None:
    script_errors = lambda number, place: (number * 7 + place) % 5 == 0  # noqa: E731
    engine = engine_on(Machine(flat), perfect(free=free, is_wrong=script_errors), max_num_seqs=3)
    replies = engine.generate([PROMPT] * 5, SamplingParams(max_tokens=60))
    totals = totals_of(engine)
    histogram, drafted, accepted = outcomes_of(replies)
    by_k: Counter[str] = Counter()
    for (_, k, _accepted), count in totals.outcomes.items():
        by_k[str(k)] += count
    assert by_k == histogram
    assert by_source(totals.outcomes) == {"scripted": (drafted, accepted)}
    positions = accepted_by_position(totals.outcomes)
    assert (sum(positions[0]), sum(positions[1])) == (drafted, accepted)
    assert all(b <= a for a, b in zip(*positions, strict=True))
    assert sum(totals.undrafted.values()) == sum(r.speculation.classic_rounds for r in replies)
    for cause, count in totals.undrafted.items():
        assert count == sum(r.speculation.undrafted.get(cause, 0) for r in replies)
    for reply in replies:
        assert sum(reply.speculation.undrafted.values()) == reply.speculation.classic_rounds
    assert len(totals.recent_k) == sum(histogram.values()) + sum(totals.undrafted.values())


def test_positions_count_from_the_first_draft() -> None:
    outcomes = {("a", 3, 1): 2, ("b", 1, 1): 5}
    drafted, accepted = accepted_by_position(outcomes)
    assert drafted == [7, 2, 2] + [0] * (MAX_K - 3)
    assert accepted == [7] + [0] * (MAX_K - 1)
    assert by_source(outcomes) == {"a": (6, 2), "b": (5, 5)}


def test_steps_without_drafts_are_worth_what_they_took() -> None:
    engine = engine_on(Machine(per_row), perfect(is_wrong=always_wrong))
    one(engine, k="off")
    totals = totals_of(engine)
    assert totals.decode_s == pytest.approx((COUNT - 1) * STEP_S)
    assert totals.worth_s == totals.decode_s
    assert totals.busy_s == pytest.approx(totals.decode_s + len(PROMPT) * STEP_S)
    assert totals.undrafted == {"off": COUNT - 1}
    assert (totals.timed[0], totals.timed_s[0]) == (COUNT - 1, pytest.approx(totals.decode_s))


@pytest.mark.parametrize("batch", [1, 3])
def test_drafting_is_compared_with_the_classic_steps_of_the_same_tokens(batch: int) -> None:
    engine = engine_on(Machine(flat), perfect(free=True), timed=range(1, 65), max_num_seqs=batch)
    engine.generate([PROMPT] * batch, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    totals = totals_of(engine)
    classic_s = (COUNT - 1) * flat(batch)
    assert totals.worth_s == pytest.approx(classic_s, rel=0.03)
    assert totals.decode_s < 0.6 * totals.worth_s
    assert totals.classic_step_s == pytest.approx(flat(batch), rel=0.03)


def test_a_lookup_that_leads_to_nothing_is_lost_time() -> None:
    machine = Machine(flat)
    lookup_s = 0.001
    engine = engine_on(
        machine, perfect(free=True, width=0, on_propose=lambda: machine.wait(lookup_s))
    )
    one(engine, max_tokens=20)
    totals = totals_of(engine)
    assert totals.draft_s["scripted"] == pytest.approx(totals.unused_draft_s)
    assert totals.unused_draft_s >= 10 * lookup_s
    assert totals.decode_s - totals.worth_s == pytest.approx(totals.unused_draft_s)


def test_predictions_are_of_the_rounds_that_were_timed() -> None:
    engine = engine_on(Machine(flat), perfect(), k=4)
    one(engine)
    totals = totals_of(engine)
    for k in range(1, MAX_K + 1):
        assert totals.predicted[k] == totals.timed[k]
        if totals.timed[k]:
            assert totals.predicted_s[k] / totals.predicted[k] == pytest.approx(flat(k + 1))
            assert totals.timed_s[k] / totals.timed[k] == pytest.approx(flat(k + 1))
    assert totals.timed[4] > 20


def test_nothing_is_claimed_where_no_classic_step_was_measured() -> None:
    engine = engine_on(Machine(flat), perfect(), k=4)
    one(engine, max_tokens=101)
    totals = totals_of(engine)
    assert totals.timed[0] == 0
    assert (totals.decode_s, totals.worth_s) == (0, 0)


def test_steps_that_read_a_prompt_are_no_measure_of_a_width() -> None:
    engine = engine_on(Machine(flat), perfect(), max_num_seqs=2, prefill_chunk=1)
    engine.submit(PROMPT, SamplingParams(max_tokens=60))
    for _ in range(8):
        engine.step()
    engine.submit([9] * 30, SamplingParams(max_tokens=1))
    while engine.num_requests:
        engine.step()
    totals = totals_of(engine)
    rounds = sum(totals.outcomes.values()) + sum(totals.undrafted.values())
    assert 0 < sum(totals.timed) < rounds


def test_recent_widths_are_bounded_and_newest_last() -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT), max_model_len=2 * RECENT)
    engine.generate([PROMPT], SamplingParams(max_tokens=RECENT + 40, k="off", ignore_eos=True))
    assert len(totals_of(engine).recent_k) == RECENT
    engine.generate([PROMPT], SamplingParams(max_tokens=5, k=3))
    assert totals_of(engine).recent_k[-1] > 0


def test_counting_does_not_make_the_policy_look_at_quiet_steps() -> None:
    engine = engine_on(Machine(flat), perfect(free=True, width=0))
    policy = engine.policy
    assert policy is not None
    looks: list[object] = []
    learn = policy.observe_step

    def look(outcome: StepOutcome) -> None:
        looks.append(outcome)
        learn(outcome)

    policy.observe_step = look  # type: ignore[method-assign]
    one(engine)
    assert sum(totals_of(engine).undrafted.values()) == COUNT - 1
    assert 1 <= len(looks) <= 3 + COUNT // 16


def failing_drafter() -> Scripted:
    return Scripted(SCRIPT, free=True, on_propose=_fail)


def _fail() -> None:
    raise RuntimeError("lost its weights")


def test_every_round_without_drafts_has_its_cause() -> None:
    machine = Machine(per_row)
    engine = engine_on(machine, perfect(is_wrong=always_wrong))
    one(engine)
    undrafted = totals_of(engine).undrafted
    assert undrafted["unmeasured"] >= 3
    assert undrafted["does_not_pay"] > 50
    assert set(undrafted) <= set(CAUSES)

    failed = fake_engine(drafter=failing_drafter)
    failed.generate([PROMPT], SamplingParams(max_tokens=20))
    assert set(totals_of(failed).undrafted) == {"failed"}

    alone = fake_engine()
    alone.generate([PROMPT], SamplingParams(max_tokens=20))
    assert set(totals_of(alone).undrafted) == {"off"}

    silent = fake_engine(drafter=NGramDrafter)
    silent.generate([list(range(20))], SamplingParams(max_tokens=2))
    assert set(totals_of(silent).undrafted) == {"nothing_offered"}


def test_a_spent_budget_is_told_from_a_width_that_does_not_pay() -> None:
    engine = engine_on(Machine(flat), perfect())
    one(engine, max_tokens=20)
    assert engine.policy is not None
    engine.policy.ledger.debt_s = 1000.0
    one(engine, max_tokens=20)
    assert totals_of(engine).undrafted["budget"] > 10


def test_a_request_that_is_not_to_draft_is_off_beside_others() -> None:
    engine = engine_on(Machine(flat), perfect(), max_num_seqs=2)
    for k in ("off", "auto"):
        engine.submit(PROMPT, SamplingParams(max_tokens=30, k=k))  # type: ignore[arg-type]
    while engine.num_requests:
        engine.step()
    assert totals_of(engine).undrafted["off"] == 29


def test_every_reason_of_the_policy_has_a_cause() -> None:
    """A reason that begins in a new way would be counted as "other", where nobody looks."""
    folder = Path(slipstream.policy.__file__).parent
    source = "\n".join((folder / name).read_text("utf-8") for name in ("choose.py", "plan.py"))
    found = re.findall(r'f?"((?:decline|classic|unmeasured|enable|probe)\b[^"]*)"', source)
    reasons = [reason for reason in found if ":" in reason]
    assert len(reasons) >= 5
    whose = ("the loss budget", "a neighbour's budget")
    for reason, name in itertools.product(reasons, whose):
        assert cause_of(reason.replace("{whose}", name)) in CAUSES.keys() - {"other"}
    assert cause_of("decline: a round of 3.1 ms yields 1.02 tokens") == "does_not_pay"
    assert cause_of("something new") == "other"


class Lookup(Scripted):
    """A free drafter with a name of its own that is often wrong."""

    name = "lookup"


def test_each_of_two_drafters_is_counted_under_its_own_name() -> None:
    machine = Machine(flat)
    paid = perfect(on_propose=lambda: machine.wait(0.0002))
    engine = engine_on(machine, paid)
    engine.pairing.make_drafters = [
        lambda: Lookup(SCRIPT, lambda _, place: place > 0, free=True),
        *engine.pairing.make_drafters,
    ]
    reply = one(engine)
    totals = totals_of(engine)
    sources = by_source(totals.outcomes)
    assert sources == {
        name: (counts["drafted"], counts["accepted"])
        for name, counts in reply.speculation.sources.items()
        if counts["drafted"]
    }
    assert sources["scripted"][0] > 0
    assert totals.draft_s["scripted"] > 0
