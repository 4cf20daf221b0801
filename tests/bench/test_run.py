"""Arms take turns, outputs are compared, and what is measured on a virtual clock is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.bench.peers import PeerError, PeerReply
from slipstream.bench.plan import Group, groups_of
from slipstream.bench.record import against_peers
from slipstream.bench.run import Run
from slipstream.bench.summary import Row, Trials
from slipstream.bench.tables import answer, precision
from slipstream.bench.workload import OVERALL, Workload
from tests.bench.worlds import (
    ROW_S,
    STEP_S,
    VARIANT,
    World,
    bench,
    conversation,
    limits,
    never,
    setup_of,
    workload,
)
from tests.fake_model import VOCAB


def run(world: World, asked: Workload, k_values: Any, **more: Any) -> Run:
    own = bench(world, k_values, more.pop("rates", (1.0,)), peers=more.pop("peers", ()))
    batches = more.get("batches", (1,))
    own.warm_up(limits(batches=batches), never)
    return own.run(groups_of(asked, batches), limits(**more), never)


def rows_of(done: Run) -> dict[tuple[str, str], Row]:
    trials = Trials(done, {VARIANT.name: {1: STEP_S, 16: STEP_S + 15 * ROW_S}})
    return {(row.name, row.category): row for row in trials.rows()}


def drafted(done: Run) -> Row:
    """Return the row over all categories of the arm that drafts."""
    (row,) = (
        row
        for (_, category), row in rows_of(done).items()
        if category == OVERALL and row.requested_k != 0
    )
    return row


def test_arms_answer_forth_and_back() -> None:
    done = run(World(), workload(conversation(1), conversation(2)), [0, 2, "auto"])
    assert [trial.arm for trial in done.trials] == [0, 1, 2, 2, 1, 0] * 2
    assert [trial.turn for trial in done.trials] == [0, 0, 0, 1, 1, 1] * 2
    assert not done.mismatches


def test_speedup_of_a_fixed_width_is_what_its_rounds_take() -> None:
    """With every draft right a round of 3 gives 4 tokens for 13 ms, classic gives 4 for 40."""
    done = run(World(), workload(*map(conversation, range(4))), [0, 3], max_tokens=25)
    row = rows_of(done)["k=3", OVERALL]
    assert row.tokens == 4 * 24 * 2
    assert row.speedup == pytest.approx(4 * STEP_S / (STEP_S + 3 * ROW_S))
    assert row.ci == pytest.approx((row.speedup, row.speedup))
    assert row.predicted_speedup == pytest.approx(row.speedup)
    assert row.outcome == "gain"
    assert (row.mean_drafted, row.acceptance_length) == (3.0, 4.0)
    assert row.acceptance_by_position == [1.0, 1.0, 1.0]
    assert row.k_histogram == {"3": 48}
    assert row.latency_ms["p50"] == pytest.approx(1e3 * (STEP_S + 3 * ROW_S) / 4)
    assert row.latency_ms["worst"] == pytest.approx(1e3 * (STEP_S + 3 * ROW_S))
    assert row.verify_ms == pytest.approx(1e3 * (STEP_S + 3 * ROW_S))


def test_a_drafter_that_is_always_wrong_is_shown_as_a_loss() -> None:
    done = run(World(), workload(*map(conversation, range(4))), [0, 4], rates=(0.0,))
    row = rows_of(done)["k=4 (ran 3.7)", OVERALL]  # the last rounds have no room for four
    assert row.speedup == pytest.approx(STEP_S / (STEP_S + ROW_S * row.mean_drafted), rel=0.02)
    assert row.outcome == "loss"
    assert row.acceptance_length == 1.0


def test_scripted_acceptance_is_seen_by_position() -> None:
    asked = workload(*map(conversation, range(20)))
    done = run(World(), asked, [0, 2], rates=(0.8, 0.5), max_tokens=120)
    row = rows_of(done)["k=2", OVERALL]
    assert row.acceptance_by_position == pytest.approx([0.8, 0.5], abs=0.05)


def test_a_batch_is_answered_side_by_side_and_its_tokens_are_all_counted() -> None:
    done = run(World(), workload(*map(conversation, range(4))), [0, 3], batches=(4,), max_tokens=21)
    row = rows_of(done)["classic", OVERALL]
    assert row.batch == 4
    assert row.prompts == 4
    assert row.tokens == 2 * 4 * 20
    assert row.seconds == pytest.approx(2 * 20 * (STEP_S + 3 * ROW_S))


def test_a_different_output_stops_the_run_and_says_where() -> None:
    world = World()
    own = bench(world, [0, 2])
    own.warm_up(limits(), never)
    engine = own._engine(1, 1)
    original = engine._scheduler.add

    def tampered(request: Any) -> None:
        request.sequence.token_ids[-1] = (request.sequence.token_ids[-1] + 1) % VOCAB
        original(request)

    engine._scheduler.add = tampered  # type: ignore[method-assign]
    asked = workload(conversation(1), conversation(2))
    done = own.run(groups_of(asked, (1,)), limits(), never)
    assert len(done.mismatches) == 2  # both passes of the arm, and the second prompt never ran
    assert {trial.group for trial in done.trials} == {0}
    first = done.mismatches[0]
    assert (first.arm, first.position) == ("k=2", 0)
    assert str(first.expected) in str(first)
    assert str(first.got) in str(first)


def test_later_turns_follow_what_classic_decoding_answered() -> None:
    world = World(template=_Plain())
    asked = workload(conversation(1, turns=2), conversation(2))
    groups = groups_of(asked, (1,))
    assert [(group.conversations[0].id, group.turn) for group in groups] == [
        ("1", 0),
        ("1", 1),
        ("2", 0),
    ]
    own = bench(world, [0, 2])
    own.warm_up(limits(), never)
    done = own.run(groups, limits(max_tokens=8), never)
    answer = next(trial for trial in done.trials if trial.group == 0).texts[0]
    prompts = _Plain.seen
    assert any(answer in text for text in prompts if text.count("user:") == 2)


def test_what_does_not_fit_is_left_out_with_a_note_and_so_are_the_turns_behind_it() -> None:
    asked = workload(conversation(1, turns=2), conversation(2))
    done = run(World(max_model_len=40), asked, [0, 2], max_tokens=30)
    assert not done.trials
    assert len(done.notes) == 3
    assert "do not fit the context of 40" in done.notes[0]
    assert "earlier turn" in done.notes[1]


def test_groups_that_do_not_fit_the_pages_are_left_out_with_a_note() -> None:
    asked = workload(*map(conversation, range(8)))
    done = run(World(kv_tokens=96), asked, [0, 2], batches=(1, 4), max_tokens=30)
    assert {done.groups[trial.group].batch for trial in done.trials} == {1}
    assert sum("do not fit the KV cache of 96" in note for note in done.notes) == 2


def test_the_turns_of_a_conversation_are_one_draw() -> None:
    """Two conversations of four turns each know no more about other conversations than two do."""
    world = World(template=_Plain(), max_model_len=512)
    asked = workload(conversation(1, turns=4), conversation(2, turns=4))
    row = drafted(run(world, asked, [0, 3], rates=(0.5,), max_tokens=12))
    assert (row.prompts, row.conversations) == (8, 2)
    short = workload(conversation(1), conversation(2))
    first = drafted(run(World(), short, [0, 3], rates=(0.5,), max_tokens=40))
    for own in (row, first):
        assert own.ci is not None
        assert own.ci[1] / own.ci[0] > 1.2


def test_classic_decoding_says_the_same_alone_and_in_a_batch() -> None:
    asked = workload(*map(conversation, range(4)))
    own = bench(World(), [0, 2])
    own.warm_up(limits(batches=(1, 4)), never)
    groups = groups_of(asked, (1, 4))
    assert not own.run(groups, limits(), never).mismatches
    prompt, said = next(iter(own._said.items()))
    own._said[prompt] = [said[0], said[1] + 1, *said[2:]]
    found = own.run(groups, limits(), never).mismatches
    assert found[0].arm.startswith("classic")
    assert found[0].position == 1


def test_prediction_counts_padding_rows() -> None:
    world = World(verify_pad="8")
    done = run(world, workload(*map(conversation, range(3))), [0, 2], max_tokens=25)
    forwards = done.trials[1].forwards
    assert set(forwards) == {8}
    assert done.trials[0].forwards.keys() == {1}


def test_a_run_that_is_over_its_time_says_how_far_it_came() -> None:
    asked = workload(*map(conversation, range(6)))
    done = run(World(), asked, [0, 2], seconds=1.2, max_tokens=24)
    ran = len({trial.group for trial in done.trials})
    assert 1 <= ran < 6
    assert any(f"{ran} of 6 groups" in note for note in done.notes)


def test_groups_of_all_categories_and_batches_take_turns() -> None:
    asked = workload(*(conversation(n, c) for c in ("a", "b") for n in range(4)))
    groups = groups_of(asked, (1, 2))
    halves = groups[:6], groups[6:]
    for half in halves:
        assert sorted((g.category, g.batch) for g in half) == sorted(
            [("a", 1), ("a", 1), ("b", 1), ("b", 1), ("a", 2), ("b", 2)]
        )


def test_the_bench_itself_takes_no_virtual_time() -> None:
    done = run(World(), workload(conversation(1)), [0, 2])
    assert done.own_share == 0.0


class _Plain:
    """A chat template that is plain text, and remembers what it made."""

    seen: list[str] = []  # noqa: RUF012 - shared on purpose

    def render(self, messages: Sequence[Any]) -> str:
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        self.seen.append(text)
        return text[-150:]


class FakePeer:
    """Another engine, which fails from its n-th reply on."""

    facts: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, name: str, world: World, fails_at: int = 10**9) -> None:
        self.name, self.world, self.left = name, world, fails_at

    def settle(self, *_: Any) -> None:
        if self.left == 0:
            raise PeerError("it does not start")

    def reply(self, token_ids: Sequence[int], max_tokens: int, stops: Sequence[int]) -> PeerReply:
        self.left -= 1
        if self.left < 0:
            raise PeerError("it is gone")
        return PeerReply(token_ids=[1] * 11, first_s=0.5, seconds=0.5 + 10 * 2 * STEP_S)

    def close(self) -> None:
        pass


def test_peers_take_turns_with_our_arms_and_are_compared_by_throughput() -> None:
    world = World()
    asked = workload(*map(conversation, range(3)))
    done = run(world, asked, [0, 3], max_tokens=25, peers=[FakePeer("other", world)])
    assert [trial.arm for trial in done.trials[:6]] == [0, 1, 2, 2, 1, 0]
    row = rows_of(done)["other", OVERALL]
    assert row.tokens_per_s == pytest.approx(1 / (2 * STEP_S))
    assert row.speedup == pytest.approx(0.5)
    (entry,) = (e for e in against_peers(Trials(done, {})) if e["category"] == OVERALL)
    assert (entry["arm"], entry["peer"]) == ("classic", "other")
    assert entry["ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(("fails_at", "reason"), [(0, "does not start"), (3, "is gone")])
def test_a_peer_that_fails_is_noted_and_the_run_goes_on(fails_at: int, reason: str) -> None:
    world = World()
    asked = workload(*map(conversation, range(3)))
    done = run(world, asked, [0, 3], peers=[FakePeer("other", world, fails_at)])
    assert reason in done.failed["other"]
    assert {trial.group for trial in done.trials if trial.arm == 1} == {0, 1, 2}


def test_groups_name_what_they_ask() -> None:
    group = Group(category="code", conversations=(conversation(1), conversation(2)), turn=1)
    assert group.name == "code 1, 2, turn 2"


def test_the_answer_and_the_precision_are_said_in_a_sentence_each() -> None:
    done = run(World(), workload(*map(conversation, range(4))), [0, 3, "auto"], max_tokens=25)
    trials = Trials(done, {VARIANT.name: {1: STEP_S, 16: STEP_S + 15 * ROW_S}})
    rows = trials.rows()
    setup = setup_of()
    said = list(answer(setup, done, rows))
    assert "4 of 4 groups of prompts" in said[0]
    assert said[1].startswith("batch 1: auto ")
    assert "best fixed width k=3" in said[1]
    assert "within the ±100 % asked for" in precision(setup, rows)
    assert "no interval" in precision(setup, [row for row in rows if row.ci is None])
