"""Wrong requests, cancelled ones and failing steps: the engine goes on and keeps no page."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import SamplingParams
from tests.fake_model import VOCAB, Scripted, continuation, fake_engine, forwards

PROMPT = list(range(1, 38))
TEXT = continuation(PROMPT, 60)
SCRIPT = PROMPT + TEXT


def assert_serves(engine: Engine) -> None:
    """Check that nothing is left over and the next request is served."""
    assert (engine.pages.num_taken, engine.num_requests) == (0, 0)
    (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=20))
    assert reply.token_ids == TEXT[:20]
    assert engine.pages.num_taken == 0


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "at least 1 token, got 0"),
        ([1, VOCAB], {}, "prompt", r"in \[0, 97\), got 97"),
        ([-1], {}, "prompt", r"in \[0, 97\), got -1"),
        ([1.5], {}, "prompt", "must be integers, got 1.5"),
        (7, {}, "prompt", "text, token ids or messages, got int"),
        ([{"role": "user"}], {}, "messages", "this model has none"),
        ([1], {"max_tokens": 0}, "max_tokens", ">= 1, got 0"),
        ([1], {"max_tokens": -3}, "max_tokens", ">= 1, got -3"),
        ([1], {"max_tokens": 2.0}, "max_tokens", "must be an integer, got 2.0"),
        ([1], {"temperature": -0.1}, "temperature", r"in \[0, 100\], got -0.1"),
        ([1], {"temperature": float("nan")}, "temperature", "got nan"),
        ([1], {"temperature": float("inf")}, "temperature", "got inf"),
        ([1], {"n": 0}, "n", r"in \[1, 64\], got 0"),
        ([1], {"min_tokens": 300}, "min_tokens", "got 300"),
        ([1], {"stop": ("",)}, "stop", "at least 1 character"),
        ([1], {"k": 16}, "k", r"in \[0, 15\], got 16"),
        ([1], {"k": -1}, "k", r"in \[0, 15\], got -1"),
        ([1], {"k": float("nan")}, "k", "got nan"),
        ([1], {"k": "many"}, "k", "got many"),
        ([1], {"seed": -1}, "seed", r"in \[0, 2\*\*64\), got -1"),
        ([1], {"seed": 2**64}, "seed", "got 18446744073709551616"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids", "got 97"),
    ],
)
def test_a_wrong_request_is_refused_by_name_before_anything_runs(
    prompt: Any, params: dict[str, Any], param: str, message: str
) -> None:
    engine = fake_engine(drafter=NGramDrafter)
    calls: list[Callable[[], object]] = [
        lambda: engine.submit(prompt, SamplingParams(**params)),
        lambda: engine.stream(prompt, SamplingParams(**params)),
        lambda: engine.generate([PROMPT, prompt], SamplingParams(**params)),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=message) as error:
            call()
        assert error.value.param == param
    assert not forwards(engine)
    assert_serves(engine)


@pytest.mark.parametrize("length", [37, 38, 100])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(RequestError, match=f"context of 37, got a prompt of {length}") as error:
        fake_engine(max_model_len=37).submit([1] * length)
    assert error.value.code == "context_length_exceeded"
    fake_engine(max_model_len=37).submit([1] * 36)


@pytest.mark.parametrize(("own", "asked", "allowed"), [(4, 4, True), (4, 5, False)])
def test_a_request_may_lower_the_engine_s_k_and_never_raise_it(
    own: int, asked: int, allowed: bool
) -> None:
    engine = fake_engine(k=own, drafter=NGramDrafter)
    if allowed:
        engine.submit(PROMPT, SamplingParams(k=asked))
        engine.submit(PROMPT, SamplingParams(k="off"))
    else:
        with pytest.raises(RequestError, match=r"k must be in \[0, 4\] here, got 5"):
            engine.submit(PROMPT, SamplingParams(k=asked))


def test_a_k_above_the_drafter_s_ceiling_is_an_error_and_never_less() -> None:
    class Shallow(Scripted):
        max_k = 3

    engine = fake_engine(drafter=lambda: Shallow(SCRIPT))
    with pytest.raises(RequestError, match=r"k must be in \[0, 3\] here, got 8"):
        engine.submit(PROMPT, SamplingParams(k=8))


def test_a_max_k_bounds_auto_and_is_lowered_only() -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT, free=True), max_k=5)
    for max_k, k in ((6, None), (-1, None), (3, 4)):
        with pytest.raises(RequestError, match=r"k must be in \[0, [35]\] here"):
            engine.submit(PROMPT, SamplingParams(k=k, max_k=max_k))
    for max_k in (5, 2, 0):
        for k in (None, max_k):
            params = SamplingParams(max_tokens=60, k=k, max_k=max_k)
            (reply,) = engine.generate([PROMPT], params)
            assert reply.token_ids == TEXT
            assert all(int(width) <= max_k for width in reply.speculation.k_histogram)
            assert k is None or not max_k or reply.speculation.k_histogram[str(k)] > 0


def test_numpy_ids_are_taken() -> None:
    (reply,) = fake_engine().generate([np.array(PROMPT)], SamplingParams(max_tokens=5))
    assert reply.token_ids == TEXT[:5]


def test_as_many_params_as_prompts() -> None:
    with pytest.raises(RequestError, match="2 prompts need as many params, got 1"):
        fake_engine().generate([PROMPT, PROMPT], [SamplingParams()])


def test_an_idle_step_does_nothing() -> None:
    engine = fake_engine()
    assert engine.step() == []
    assert not forwards(engine)


@pytest.mark.parametrize("num_steps", range(9))
def test_cancel_at_any_point_frees_pages_and_returns_what_there_is(num_steps: int) -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT), prefill_chunk=10)
    request_id = engine.submit(PROMPT, SamplingParams(max_tokens=60, k=3))
    emitted: list[int] = []
    for _ in range(num_steps):
        emitted += [i for output in engine.step() for i in output.chunk.token_ids]
    (reply,) = engine.cancel(request_id)
    assert reply.finish_reason == "cancelled"
    assert reply.token_ids == emitted == TEXT[: len(emitted)]
    assert reply.text == "".join(f"<{i}>" for i in emitted)
    assert engine.cancel(request_id) == []
    assert_serves(engine)


def test_cancelling_a_waiting_request_leaves_the_running_one_alone() -> None:
    engine = fake_engine(max_num_seqs=1)
    running = engine.stream(PROMPT, SamplingParams(max_tokens=10))
    first = next(running)
    waiting = engine.submit([1, 2, 3])
    (reply,) = engine.cancel(waiting)
    assert (reply.token_ids, reply.timing.prefill_s) == ([], 0.0)
    assert first.token_ids + [i for c in running for i in c.token_ids] == TEXT[:10]


def test_rollback_after_cancel_keeps_the_next_request_s_text() -> None:
    engine = fake_engine(drafter=lambda: Scripted(SCRIPT, lambda _, place: place == 1))
    request_id = engine.submit(PROMPT, SamplingParams(max_tokens=60, k=15))
    for _ in range(3):
        engine.step()
    (request,) = engine._scheduler
    assert request.sequence.kv_len == len(request.sequence.token_ids) - 1
    engine.cancel(request_id)
    assert_serves(engine)


def test_a_thousand_cancels_leak_no_page() -> None:
    # oMLX 2235: a client gone in mid-round wedged the engine for ever.
    draw = random.Random(0)
    engine = fake_engine(drafter=NGramDrafter, prefill_chunk=16)
    for _ in range(1000):
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=40, k=draw.randrange(16)))
        for _ in range(draw.randrange(5)):
            next(stream)
        stream.close()
        assert engine.pages.num_taken == 0
    assert_serves(engine)


def test_a_stream_that_is_never_read_queues_nothing() -> None:
    engine = fake_engine()
    stream = engine.stream(PROMPT)
    assert engine.num_requests == 0
    stream.close()
    assert_serves(engine)


def test_a_cancelled_stream_ends_with_its_reply() -> None:
    engine = fake_engine()
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=40))
    next(stream)
    (request,) = engine._scheduler
    engine.cancel(request.id)
    (last,) = stream
    assert last.reply is not None
    assert last.reply.finish_reason == "cancelled"


class Flaky:
    """Fails at one call, as often as it is armed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls_left = -1

    def __call__(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("forward", RuntimeError("lost")),
        ("forward", KeyboardInterrupt()),
        ("propose", KeyboardInterrupt()),
        ("peek", KeyboardInterrupt()),
    ],
)
@pytest.mark.parametrize("call", [1, 2, 4, 5, 7])
def test_an_exception_inside_a_step_neither_leaks_pages_nor_wedges_the_engine(
    where: str, call: int, error: BaseException
) -> None:
    flaky = Flaky(error)
    engine = fake_engine(
        drafter=lambda: Scripted(
            SCRIPT,
            free=where == "peek",
            on_propose=(lambda: None) if where == "forward" else flaky,
        ),
        after_forward=flaky if where == "forward" else lambda: None,
        prefill_chunk=16,
    )
    params = SamplingParams(max_tokens=40, k=3)
    flaky.calls_left = call
    with pytest.raises(type(error)):
        engine.generate([PROMPT, [1, 2, 3]], params)
    assert (engine.pages.num_taken, engine.num_requests) == (0, 0)
    flaky.calls_left = call
    with pytest.raises(type(error)):
        list(engine.stream(PROMPT, params))
    flaky.calls_left = -1
    assert_serves(engine)


@pytest.mark.parametrize("call", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["propose", "peek"])
def test_a_drafter_that_fails_is_dropped_for_its_request_alone(
    where: str, call: int, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(RuntimeError("lost"))
    engine = fake_engine(
        drafter=lambda: Scripted(SCRIPT, free=where == "peek", on_propose=flaky), prefill_chunk=16
    )
    flaky.calls_left = call
    replies = engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=40, k=3))
    assert [reply.token_ids for reply in replies] == [TEXT[:40]] * 2
    failed = ["RuntimeError: lost" in reply.speculation.reason for reply in replies]
    assert sorted(failed) == [False, True]
    report = replies[failed.index(True)].speculation
    assert (report.drafter, report.classic_rounds > 0) == ("scripted", True)
    assert replies[failed.index(False)].speculation.rounds == 10
    assert len(caplog.messages) == 1
    assert_serves(engine)


@pytest.mark.parametrize("where", ["make", "observe", "release", "nonsense"])
def test_whatever_a_drafter_does_wrong_the_reply_is_the_target_s(where: str) -> None:
    class Broken(Scripted):
        def __init__(self) -> None:
            super().__init__(SCRIPT)
            if where == "make":
                raise OSError("no such file")

        def propose(self, token_ids: Any, k: int) -> Any:
            return "nonsense" if where == "nonsense" else super().propose(token_ids, k)

        def observe(self, proposed: Any, accepted: int) -> None:
            if where == "observe":
                raise ValueError("no")

        def release(self) -> None:
            if where == "release":
                raise ValueError("no")

    engine = fake_engine(drafter=Broken)
    (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=40, k=3))
    assert reply.token_ids == TEXT[:40]
    assert ("failed" in reply.speculation.reason) == (where != "release")
    assert_serves(engine)


def test_requests_behind_a_failed_one_are_served() -> None:
    flaky = Flaky(RuntimeError("lost"))
    engine = fake_engine(after_forward=flaky, max_num_seqs=1)
    engine.submit([1, 2, 3])
    behind = engine.submit(PROMPT, SamplingParams(max_tokens=3))
    flaky.calls_left = 2
    engine.step()
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    outputs = [output for _ in range(3) for output in engine.step()]
    assert {output.request_id for output in outputs} == {behind}
    assert [i for output in outputs for i in output.chunk.token_ids] == TEXT[:3]
    assert_serves(engine)


def test_a_stream_whose_request_was_dropped_says_so() -> None:
    flaky = Flaky(RuntimeError("lost"))
    engine = fake_engine(after_forward=flaky)
    stream = engine.stream(PROMPT)
    next(stream)
    flaky.calls_left = 1
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    with pytest.raises(SlipstreamError, match="dropped"):
        next(stream)
    assert_serves(engine)
