"""Many sequences at once, around a fake model: who runs, who waits, who gets which rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.types import MAX_K, DetailedReply, Reply, SamplingParams
from tests.engine_checks import check_engine
from tests.fake_model import Scripted, always_wrong, continuation, fake_engine, forwards

PROMPT = list(range(1, 38))
TEXT = continuation(PROMPT, 200)
SCRIPT = PROMPT + TEXT


def run(engine: Engine) -> dict[int, list[int]]:
    """Step until nothing is left, checking the engine each time; return ids by request."""
    ids: dict[int, list[int]] = {}
    while engine.num_requests:
        for output in engine.step():
            ids.setdefault(output.request_id, []).extend(output.chunk.token_ids)
        check_engine(engine)
    return ids


def test_running_requests_share_each_forward() -> None:
    engine = fake_engine(max_num_seqs=4)
    prompts = [[i, i + 1, 2 * i] for i in range(1, 5)]
    replies = engine.generate(prompts, SamplingParams(max_tokens=10))
    assert [r.token_ids for r in replies] == [continuation(p, 10) for p in prompts]
    assert [len(rows.token_ids) for rows in forwards(engine)] == [12] + [4] * 9


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_in_order() -> None:
    engine = fake_engine(max_num_seqs=2)
    ids = [engine.submit([i, i, i], SamplingParams(max_tokens=3)) for i in range(1, 6)]
    order = []
    while engine.num_requests:
        order += [o.request_id for o in engine.step() if o.chunk.reply]
        check_engine(engine)
    assert order == ids
    assert max(len(set(rows.sequences)) for rows in forwards(engine)) == 2


def test_a_long_prompt_does_not_stop_the_others_tokens() -> None:
    engine = fake_engine(prefill_chunk=8, max_model_len=512)
    first = engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
    engine.step()
    engine.submit([7] * 200, SamplingParams(max_tokens=2))
    for _ in range(25):
        outputs = engine.step()
        assert [o.request_id for o in outputs if o.request_id == first] == [first]
        assert len(forwards(engine)[-1].token_ids) == 1 + 8


def test_decoding_does_not_stop_a_prompt() -> None:
    drafter = lambda: Scripted(SCRIPT)  # noqa: E731
    engine = fake_engine(drafter=drafter, max_batch_rows=9, max_num_seqs=8, max_model_len=512)
    for _ in range(4):
        engine.submit(PROMPT, SamplingParams(max_tokens=150))
    while any(not r.sequence.num_generated for r in engine._scheduler):
        engine.step()
    late = engine.submit([5] * 40, SamplingParams(max_tokens=2))
    ids: list[int] = []
    for _ in range(20):
        ids += [i for o in engine.step() if o.request_id == late for i in o.chunk.token_ids]
        check_engine(engine)
    assert ids == continuation([5] * 40, 2)
    assert all(len(rows.token_ids) <= 9 for rows in forwards(engine))


def test_prompts_are_read_in_order_of_arrival_within_one_chunk() -> None:
    engine = fake_engine(prefill_chunk=20)
    for i in (1, 2, 3):
        engine.submit([i] * 15, SamplingParams(max_tokens=1))
    run(engine)
    assert [rows.sequences.tolist() for rows in forwards(engine)] == [
        [0] * 15 + [1] * 5,
        [0] * 10 + [1] * 10,
        [0] * 5,
    ]


@pytest.mark.parametrize("rows", [8, 9, 16, 24, 40])
def test_drafts_shrink_to_the_row_budget_and_the_text_stays(rows: int) -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT), max_batch_rows=rows, prefix_cache="off")
    replies = engine.generate([PROMPT] * 8, SamplingParams(max_tokens=40, k=15))
    assert all(reply.token_ids == TEXT[:40] for reply in replies)
    sizes = [len(step.token_ids) for step in forwards(engine)]
    assert max(sizes) == rows


def test_padding_may_go_beyond_the_row_budget() -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT), max_batch_rows=10, verify_pad="16")
    (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=40, k=15))
    assert reply.token_ids == TEXT[:40]


DRAFTERS: dict[str, Callable[[], Drafter] | None] = {
    "none": None,
    "ngram": NGramDrafter,
    "right": lambda: Scripted(SCRIPT),
    "wrong": lambda: Scripted(SCRIPT, always_wrong),
    "uneven": lambda: Scripted(SCRIPT, lambda n, place: place == n % 5),
}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_few_tokens_with_many_drafts_in_a_batch(drafter: str, max_tokens: int) -> None:
    engine = fake_engine(drafter=DRAFTERS[drafter])
    replies = engine.generate([PROMPT] * 5, SamplingParams(max_tokens=max_tokens, k=7))
    assert [reply.token_ids for reply in replies] == [TEXT[:max_tokens]] * 5
    assert {reply.finish_reason for reply in replies} == {"length"}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompts_that_leave_room_for_one_token_share_a_forward(drafter: str) -> None:
    engine = fake_engine(drafter=DRAFTERS[drafter], max_model_len=38)
    replies = engine.generate([PROMPT] * 3, SamplingParams(max_tokens=9, k=15))
    assert [reply.token_ids for reply in replies] == [TEXT[:1]] * 3


def test_a_request_waits_until_all_pages_that_it_may_need_are_free() -> None:
    engine = fake_engine(kv_tokens=8 * 16, prefix_cache="off")
    large = SamplingParams(max_tokens=60)  # 37 + 59 positions: 6 pages
    first, second = engine.submit(PROMPT, large), engine.submit(PROMPT[::-1], large)
    small = engine.submit([1], SamplingParams(max_tokens=2))
    engine.step()
    assert [r.id for r in engine._scheduler._running] == [first]
    engine.cancel(first)
    outputs = engine.step()
    # The small one would have fitted all along; it does not overtake.
    assert [o.request_id for o in outputs] == [second, small]
    ids = run(engine)
    assert len(ids[second]) == 59
    assert engine.pages.num_taken == 0


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine = fake_engine(kv_tokens=64)
    with pytest.raises(RequestError, match=r"64 tokens of KV, got 37 \+ 40") as error:
        engine.submit(PROMPT, SamplingParams(max_tokens=40))
    assert error.value.code == "kv_capacity_exceeded"
    assert engine.generate([PROMPT], SamplingParams(max_tokens=28))[0].token_ids == TEXT[:28]


def test_a_full_pool_is_filled_to_the_last_page_without_a_failure() -> None:
    engine = fake_engine(drafter=DRAFTERS["uneven"], kv_tokens=16 * 16, max_num_seqs=8)
    prompts = [[*PROMPT[i:], i] for i in range(20)]
    replies = engine.generate(prompts, SamplingParams(max_tokens=30, k=7))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.token_ids == continuation(prompt, 30)


def test_every_choice_is_a_reply_of_its_own_and_they_share_the_prompt() -> None:
    engine = fake_engine(max_num_seqs=4)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=4)
    replies = engine.generate([PROMPT], params)
    assert [reply.choice for reply in replies if isinstance(reply, DetailedReply)] == [0, 1, 2, 3]
    assert len({tuple(reply.token_ids) for reply in replies}) == 4
    assert engine.stats.cached_tokens == 3 * 32
    # Choice 0 is what a request for one gives; the others are the same however they are run.
    (single,) = engine.generate([PROMPT], SamplingParams(max_tokens=20, temperature=1.0, seed=3))
    assert single.token_ids == replies[0].token_ids
    again = fake_engine(max_num_seqs=1, prefix_cache="off").generate([PROMPT], params)
    assert [r.token_ids for r in again] == [r.token_ids for r in replies]


def test_a_stream_of_choices_ends_with_the_last_of_them() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, n=3)
    engine = fake_engine()
    by_choice: dict[int, list[int]] = {0: [], 1: [], 2: []}
    replies: dict[int, Reply] = {}
    for chunk in engine.stream(PROMPT, params):
        by_choice[chunk.choice] += chunk.token_ids
        if chunk.reply:
            replies[chunk.choice] = chunk.reply
    assert {c: r.token_ids for c, r in replies.items()} == by_choice


def test_cancel_ends_all_choices_that_still_run() -> None:
    engine = fake_engine(max_num_seqs=2)
    request_id = engine.submit(PROMPT, SamplingParams(max_tokens=90, temperature=1.0, n=5))
    for _ in range(5):
        engine.step()
    replies = engine.cancel(request_id)
    assert [reply.finish_reason for reply in replies] == ["cancelled"] * 5
    assert (engine.num_requests, engine.pages.num_taken) == (0, 0)


def test_one_request_whose_every_token_is_banned_ends_alone() -> None:
    engine = fake_engine()
    impossible = SamplingParams(bad_words_ids=[[i] for i in range(97)])  # type: ignore[arg-type]
    bad, good = engine.submit([1, 2], impossible), engine.submit(PROMPT, SamplingParams())
    (failed, fine) = engine.step()
    assert (failed.request_id, fine.request_id) == (bad, good)
    assert failed.chunk.reply is not None
    assert failed.chunk.reply.finish_reason == "error"
    assert failed.chunk.error is not None
    assert fine.chunk.token_ids == TEXT[:1]
    with pytest.raises(type(failed.chunk.error), match="forbidden"):
        engine.generate([[1, 2]], impossible)
    check_engine(engine)


def test_stop_strings_trim_text_ids_and_logprobs_together() -> None:
    known = "".join(f"<{i}>" for i in TEXT[:12])
    stop = known[known.index(f"<{TEXT[7]}>") + 1 :][: len(f"{TEXT[7]}><")]  # straddles two tokens
    assert known.index(stop) > known.index(f"<{TEXT[6]}>")
    for k in (0, 3, 15):
        engine = fake_engine(drafter=lambda: Scripted(SCRIPT))
        params = SamplingParams(max_tokens=40, stop=(stop,), logprobs=1, k=k)
        chunks = list(engine.stream(PROMPT, params))
        reply = chunks[-1].reply
        assert isinstance(reply, DetailedReply)
        assert reply.finish_reason == "stop"
        assert reply.text == known[: known.index(stop)] == "".join(c.text for c in chunks)
        assert len(reply.logprobs or []) == len(reply.token_ids)
        # The fake detokenizer lets a token's text go once the next one begins.
        assert reply.token_ids == TEXT[:10] == [i for c in chunks for i in c.token_ids]


def test_stop_strings_wait_for_min_tokens() -> None:
    (reply,) = fake_engine().generate(
        [PROMPT], SamplingParams(max_tokens=40, stop=("<",), min_tokens=5)
    )
    assert (reply.finish_reason, len(reply.token_ids) > 5) == ("stop", True)


def test_plain_replies_have_no_further_fields() -> None:
    (reply,) = fake_engine().generate([PROMPT], SamplingParams(max_tokens=2))
    assert type(reply) is Reply


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_one_per_token_and_the_serial_ones(drafter: str, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=5, logprobs=3, presence_penalty=0.5, k=5
    )
    (serial,) = fake_engine(prefix_cache="off").generate([PROMPT], params)
    engine = fake_engine(drafter=DRAFTERS[drafter])
    for reply in engine.generate([PROMPT] * 3, params):
        assert isinstance(reply, DetailedReply)
        assert isinstance(serial, DetailedReply)
        assert reply.token_ids == serial.token_ids
        assert reply.logprobs == serial.logprobs
        assert len(reply.logprobs or []) == len(reply.token_ids)


def test_a_thousand_cancels_in_a_batch_leak_no_page() -> None:
    draw = random.Random(0)
    engine = fake_engine(drafter=NGramDrafter, prefill_chunk=16, kv_tokens=640)
    active: list[int] = []
    for _ in range(1000):
        start = draw.choice([0, 0, 16, 5])
        params = SamplingParams(
            max_tokens=draw.randrange(1, 60),
            k=draw.randrange(MAX_K + 1),
            temperature=draw.choice([0.0, 1.0]),
            n=draw.choice([1, 1, 3]),
        )
        active.append(engine.submit(PROMPT[start:], params))
        for _ in range(draw.randrange(3)):
            engine.step()
        engine.cancel(active.pop(draw.randrange(len(active))))
        check_engine(engine)
    for request_id in active:
        engine.cancel(request_id)
    assert (engine.pages.num_taken, engine.num_requests) == (0, 0)
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.generate([PROMPT], SamplingParams(max_tokens=20))[0].token_ids == TEXT[:20]


def test_engine_counters_add_up() -> None:
    engine = fake_engine(drafter=DRAFTERS["right"])
    engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=10, k=4))
    engine.submit(PROMPT)
    engine.step()
    engine.cancel(3)
    stats = engine.stats
    assert stats.steps == len(forwards(engine))
    assert stats.rows == sum(len(rows.token_ids) for rows in forwards(engine))
    assert (stats.prompt_tokens, stats.cached_tokens) == (3 * 37, 2 * 32)
    assert (stats.completion_tokens, stats.finished, stats.cancelled) == (21, 2, 1)
