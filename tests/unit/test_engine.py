"""The engine's rounds, around a fake model: counts, limits, stops, context, reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.round import Round, pack
from slipstream.errors import RequestError
from slipstream.types import Reply, SamplingParams
from tests.fake_model import (
    Scripted,
    always_wrong,
    continuation,
    fake_engine,
    forwards,
)

PROMPT = list(range(1, 38))
COUNT = 40
TEXT = continuation(PROMPT, 200)
SCRIPT = PROMPT + TEXT

DRAFTERS: dict[str, Callable[[], Drafter] | None] = {
    "none": None,
    "ngram": NGramDrafter,
    "right": lambda: Scripted(SCRIPT),
    "wrong": lambda: Scripted(SCRIPT, always_wrong),
    "free": lambda: Scripted(SCRIPT, lambda _, place: place == 3, free=True),
    "narrow": lambda: Scripted(SCRIPT, width=2),
    "uneven": lambda: Scripted(SCRIPT, lambda n, place: place == n % 5),
}


def one(engine: Engine, prompt: list[int] = PROMPT, **params: object) -> Reply:
    """Return the reply to one prompt, having checked what every reply must satisfy."""
    params = {"max_tokens": COUNT, **params}
    (reply,) = engine.generate([prompt], SamplingParams(**params))  # type: ignore[arg-type]
    report, usage = reply.speculation, reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(reply.token_ids))
    assert report.reason
    assert sum(report.k_histogram.values()) == report.rounds
    assert sum(int(k) * n for k, n in report.k_histogram.items()) == report.drafted
    emitted = 1 + report.accepted + report.rounds + report.classic_rounds
    assert usage.completion_tokens == emitted or (
        reply.finish_reason == "stop" and usage.completion_tokens < emitted
    )
    assert (engine.pages.num_taken, engine.num_requests) == (0, 0)
    return reply


@pytest.mark.parametrize("k", [0, 1, 2, 7, 15])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_target_s_whatever_is_drafted(drafter: str, k: int) -> None:
    reply = one(fake_engine(drafter=DRAFTERS[drafter]), k=k)
    assert reply.token_ids == TEXT[:COUNT]
    assert reply.finish_reason == "length"


def test_a_right_drafter_fills_every_round() -> None:
    reply = one(fake_engine(drafter=DRAFTERS["right"]), max_tokens=41, k=7)
    report = reply.speculation
    assert (report.rounds, report.classic_rounds) == (5, 0)
    assert (report.drafted, report.accepted, report.acceptance_length) == (35, 35, 8.0)
    assert report.k_histogram == {"7": 5}
    assert report.sources == {"scripted": {"drafted": 35, "accepted": 35}}


def test_a_wrong_drafter_gains_nothing_and_loses_no_token() -> None:
    report = one(fake_engine(drafter=DRAFTERS["wrong"]), k=3).speculation
    assert (report.accepted, report.acceptance_length) == (0, 1.0)
    assert report.rounds + report.classic_rounds == COUNT - 1


def test_a_drafter_that_offers_less_makes_the_round_narrower() -> None:
    report = one(fake_engine(drafter=DRAFTERS["narrow"]), k=7, max_tokens=1 + 3 * 8).speculation
    assert report.k_histogram == {"2": 8}
    assert report.mean_drafted == 2.0


def test_no_proposal_is_a_classic_step() -> None:
    report = one(fake_engine(drafter=lambda: Scripted([])), k=7).speculation
    assert (report.rounds, report.classic_rounds) == (0, COUNT - 1)
    assert report.acceptance_length is report.mean_drafted is report.verify_ms is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_few_tokens_with_many_drafts_emit_exactly_that_many(drafter: str, max_tokens: int) -> None:
    # llama.cpp drafted past the budget: k <= remaining - 1.
    engine = fake_engine(drafter=DRAFTERS[drafter])
    reply = one(engine, max_tokens=max_tokens, k=7)
    assert reply.token_ids == TEXT[:max_tokens]
    assert reply.finish_reason == "length"
    assert all(rows.positions.max() < len(PROMPT) + max_tokens - 1 for rows in forwards(engine))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_a_full_context_ends_the_reply(drafter: str, room: int) -> None:
    limit = len(PROMPT) + room
    reply = one(fake_engine(drafter=DRAFTERS[drafter], max_model_len=limit), k=15)
    assert reply.token_ids == TEXT[:room]
    assert reply.finish_reason == "length"


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("drafter", ["none", "right", "uneven"])
def test_a_stop_is_the_last_token_wherever_in_a_round_it_falls(drafter: str, at: int) -> None:
    stop = TEXT[at]
    expected = TEXT[: TEXT.index(stop) + 1]
    for engine, params in (
        (fake_engine(drafter=DRAFTERS[drafter], stop_ids=[stop]), {}),
        (fake_engine(drafter=DRAFTERS[drafter]), {"stop_token_ids": (stop,)}),
    ):
        reply = one(engine, k=5, **params)
        assert reply.token_ids == expected
        assert reply.finish_reason == "stop"
        assert reply.text == "".join(f"<{i}>" for i in expected[:-1])


def test_accepted_counts_emitted_drafts_only_when_a_stop_cuts_a_round() -> None:
    engine = fake_engine(drafter=DRAFTERS["right"], stop_ids=[TEXT[3]])
    assert TEXT.index(TEXT[3]) == 3
    (*_, last) = engine.stream(PROMPT, SamplingParams(k=7))
    assert last.reply is not None
    assert (last.token_ids, last.accepted) == (TEXT[1:4], 3)
    assert last.reply.speculation.accepted == 3


def test_ignore_eos_goes_past_the_model_s_stops_and_keeps_the_request_s_own() -> None:
    engine = fake_engine(stop_ids=[TEXT[2]])
    assert one(engine, ignore_eos=True).token_ids == TEXT[:COUNT]
    later = next(i for i in range(3, COUNT) if TEXT.index(TEXT[i]) == i)
    reply = one(engine, ignore_eos=True, stop_token_ids=(TEXT[later],))
    assert reply.token_ids == TEXT[: later + 1]


@pytest.mark.parametrize("chunk", [1, 7, 16, 36, 37, 38, 256])
def test_prefill_runs_in_chunks_and_asks_for_one_row_of_logits(chunk: int) -> None:
    engine = fake_engine(prefill_chunk=chunk)
    assert one(engine, max_tokens=1).token_ids == TEXT[:1]
    sizes = [len(rows.token_ids) for rows in forwards(engine)]
    assert sizes == [min(chunk, 37 - start) for start in range(0, 37, chunk)]
    wanted = [rows.logit_rows.tolist() for rows in forwards(engine)]
    assert wanted == [[]] * (len(sizes) - 1) + [[sizes[-1] - 1]]


def test_a_round_verifies_the_anchor_and_k_drafts() -> None:
    engine = fake_engine(drafter=DRAFTERS["right"])
    one(engine, max_tokens=1 + 8 + 2, k=7)
    _, verify, last = forwards(engine)
    assert verify.token_ids.tolist() == TEXT[:8]
    assert verify.positions.tolist() == list(range(37, 45))
    assert verify.logit_rows.tolist() == list(range(8))
    assert last.token_ids.tolist() == TEXT[8:10]  # one draft fits before the bonus


@pytest.mark.parametrize(("pad", "rows"), [("off", 4), ("auto", 4), ("8", 8), ("3", 6)])
def test_padding_rows_fill_a_verify_and_never_a_classic_step(pad: str, rows: int) -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT[:41]), verify_pad=pad)
    assert one(engine, k=3, max_tokens=10).token_ids == TEXT[:10]
    _, verify, *classic = forwards(engine)
    assert len(verify.token_ids) == rows
    assert verify.positions.tolist() == [37, 38, 39, 40] + [-1] * (rows - 4)
    assert {len(step.token_ids) for step in classic} == {1}


def test_ids_outside_the_vocabulary_are_never_verified() -> None:
    class Foreign(Scripted):
        def propose(self, token_ids: object, k: int) -> list[int]:
            ahead = super().propose(token_ids, k)  # type: ignore[arg-type]
            return [*ahead[:2], 10**6, *ahead[2:]]

    reply = one(fake_engine(drafter=lambda: Foreign(SCRIPT)), k=7)
    assert reply.token_ids == TEXT[:COUNT]
    assert reply.speculation.k_histogram == {"2": 13}


def test_a_proposal_wider_than_asked_is_cut() -> None:
    class Wide(Scripted):
        def propose(self, token_ids: object, k: int) -> list[int]:
            return super().propose(token_ids, 15)  # type: ignore[arg-type]

    assert max(one(fake_engine(drafter=lambda: Wide(SCRIPT)), k=3).speculation.k_histogram) == "3"


def test_a_drafter_sees_committed_tokens_and_learns_what_was_accepted() -> None:
    drafters: list[Scripted] = []

    def make() -> Scripted:
        drafters.append(Scripted(SCRIPT, lambda _, place: place == 2))
        return drafters[-1]

    one(fake_engine(drafter=make), k=4)
    _, drafter = drafters  # the first one was only asked whether it is free
    assert {accepted for proposed, accepted in drafter.observed if len(proposed) > 2} == {2}
    assert drafter.num_released == 1


def test_no_drafter_is_asked_while_k_is_off() -> None:
    def fail() -> None:
        raise AssertionError("asked")

    engine = fake_engine(drafter=lambda: Scripted(SCRIPT, free=True, on_propose=fail))
    for k in ("off", 0):
        report = one(engine, k=k).speculation
        assert (report.mode, report.verdict, report.requested_k) == ("off", "off", k)


def test_report_says_that_auto_is_unmeasured() -> None:
    report = one(fake_engine(drafter=NGramDrafter)).speculation
    assert (report.mode, report.verdict, report.requested_k) == ("auto", "unmeasured", "auto")
    report = one(fake_engine()).speculation
    assert (report.drafter, report.verdict, report.sources) == ("none", "off", {})


def test_a_seed_is_echoed_or_drawn() -> None:
    assert one(fake_engine(), seed=2**64 - 1).seed == 2**64 - 1
    drawn = {one(fake_engine(), max_tokens=1).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**53 for seed in drawn)  # every JSON reader keeps these whole


def test_chunks_of_a_stream_join_to_the_reply() -> None:
    engine = fake_engine(drafter=DRAFTERS["uneven"])
    chunks = list(engine.stream(PROMPT, SamplingParams(max_tokens=COUNT, k=4)))
    reply = chunks[-1].reply
    assert reply is not None
    assert all(chunk.reply is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert [i for chunk in chunks for i in chunk.token_ids] == reply.token_ids == TEXT[:COUNT]
    assert sum(chunk.accepted for chunk in chunks) == reply.speculation.accepted
    assert [chunk.accepted for chunk in chunks[:1]] == [0]


def test_stream_and_generate_give_the_same_reply() -> None:
    replies = [one(fake_engine(drafter=NGramDrafter), seed=1)]
    replies += [
        chunk.reply
        for chunk in fake_engine(drafter=NGramDrafter).stream(
            PROMPT, SamplingParams(max_tokens=COUNT, seed=1)
        )
        if chunk.reply
    ]
    assert dataclasses.asdict(replies[0]) == dataclasses.asdict(replies[1])


def test_generate_replies_in_the_order_of_the_prompts() -> None:
    prompts = [[i, i + 1, 2 * i] for i in range(5)]
    params = [SamplingParams(max_tokens=3 + i) for i in range(5)]
    replies = fake_engine(drafter=NGramDrafter).generate(prompts, params)
    assert [r.token_ids for r in replies] == [
        continuation(prompt, 3 + i) for i, prompt in enumerate(prompts)
    ]


def test_text_is_encoded_as_it_stands_and_messages_through_the_template() -> None:
    class Template:
        def render(self, messages: object) -> str:
            return f"[{messages[0]['content']}]"  # type: ignore[index]

    engine = fake_engine(template=Template())
    text, chat = engine.generate(["ab", [{"role": "user", "content": "ab"}]], None)
    assert text.token_ids[:5] == continuation([0, 1], 5)
    assert chat.usage.prompt_tokens == 4
    assert engine.has_chat_template
    (single,) = engine.generate("ab", SamplingParams(max_tokens=5))
    assert single.token_ids == text.token_ids[:5]


def test_interleaved_streams_do_not_disturb_each_other() -> None:
    engine = fake_engine(drafter=DRAFTERS["ngram"])
    other = [5, 4, 3]
    a = engine.stream(PROMPT, SamplingParams(max_tokens=9))
    b = engine.stream(other, SamplingParams(max_tokens=9))
    first_a, first_b = next(a), next(b)
    assert first_a.token_ids + [i for c in a for i in c.token_ids] == TEXT[:9]
    assert first_b.token_ids + [i for c in b for i in c.token_ids] == continuation(other, 9)


def test_requests_that_share_a_forward_equal_their_serial_runs() -> None:
    # exllamav3 rewound rows of a batch wrongly where they accepted different lengths.
    prompts = [PROMPT, [9] * 20, [3, 1, 4]]
    for drafter in ("ngram", "uneven", "right"):
        engine = fake_engine(drafter=DRAFTERS[drafter], prefill_chunk=8, verify_pad="8")
        replies = engine.generate(prompts, SamplingParams(max_tokens=25, k=5))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.token_ids == continuation(prompt, 25)
        assert engine.pages.num_taken == 0


def test_rows_of_several_sequences_are_packed_one_after_the_other() -> None:
    engine = fake_engine()
    for prompt in (PROMPT, [1, 2, 3]):
        engine.submit(prompt)
    batch = [Round.next_of(request, 4) for request in engine._scheduler]
    batch[1].drafts = [50, 51]
    for part in batch:
        part.request.sequence.reserve(20 if part is batch[0] else 5, engine.pages)
    rows = pack(batch, pad_to=4)
    assert rows.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 50, 51, 0, 0, 0]
    assert rows.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, -1, -1, -1]
    assert rows.sequences.tolist()[:9] == [0] * 4 + [1] * 5
    assert rows.logit_rows.tolist() == [6, 7, 8]
    assert rows.page_table.shape == (2, 2)


class VirtualClock:
    """Seconds that pass only where a test lets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> Callable[[], None]:
        def advance() -> None:
            self.now += milliseconds / 1000

        return advance


def test_a_draft_is_charged_to_the_round_that_verifies_it() -> None:
    # Rapid-MLX 1441: forward 10 ms and draft 50 ms must read as a round of 60 ms.
    clock = VirtualClock()
    engine = fake_engine(
        drafter=lambda: Scripted(SCRIPT, always_wrong, on_propose=clock.pass_ms(50)),
        after_forward=clock.pass_ms(10),
        clock=clock,
    )
    reply = one(engine, k=1, max_tokens=6)
    report = reply.speculation
    assert (report.rounds, report.classic_rounds) == (4, 1)  # nothing fits before the last token
    assert report.verify_ms == pytest.approx(10)
    assert report.draft_ms == pytest.approx(50)
    assert report.overhead_ms == pytest.approx(0)
    assert report.classic_ms == pytest.approx(10)
    assert reply.timing.prefill_s == pytest.approx(0.010)
    assert reply.timing.decode_s == pytest.approx(4 * 0.060 + 0.010)
    assert reply.timing.decode_tokens_per_s == pytest.approx(5 / 0.250)


def test_time_between_steps_is_in_some_round() -> None:
    # llama.cpp 26100: 20 ms a round were in nobody's model.
    clock = VirtualClock()
    engine = fake_engine(drafter=DRAFTERS["right"], after_forward=clock.pass_ms(10), clock=clock)
    for chunk in engine.stream(PROMPT, SamplingParams(max_tokens=1 + 3 * 4, k=3)):
        clock.pass_ms(20)()
        reply = chunk.reply
    assert reply is not None
    assert reply.speculation.overhead_ms == pytest.approx(20)
    assert reply.timing.decode_s == pytest.approx(3 * 0.030)


def test_waiting_for_another_request_is_not_prefill_time() -> None:
    clock = VirtualClock()
    engine = fake_engine(after_forward=clock.pass_ms(10), clock=clock)
    replies = engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=5))
    assert [r.timing.prefill_s for r in replies] == pytest.approx([0.010, 0.010])


@pytest.mark.parametrize(
    ("prompts", "part"),
    [
        ([b"abc"], "bytes"),
        (b"abc", "bytes"),
        (5, "int"),
        ({"role": "user", "content": "hi"}, "dict"),
        ([{"role": "user", "content": "hi"}], "messages of one conversation"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_by_kind(prompts: object, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        fake_engine().generate(prompts)  # type: ignore[arg-type]


def test_params_of_another_kind_are_refused() -> None:
    with pytest.raises(RequestError, match="SamplingParams or a list of them, got int"):
        fake_engine().generate([PROMPT], 5)  # type: ignore[arg-type]
