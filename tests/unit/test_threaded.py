"""Many threads, one engine: requests are batched, nobody waits for ever, nobody gets another's."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.delivery import Item
from slipstream.engine.threaded import ThreadedEngine
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import SamplingParams
from tests.engine_checks import check_engine
from tests.fake_model import continuation, fake_engine, forwards

LONG = SamplingParams(max_tokens=200)
PATIENCE_S = 30.0  # a test that waits longer has found a deadlock


@pytest.fixture
def threaded() -> Iterator[ThreadedEngine]:
    with ThreadedEngine(slow_engine()) as engine:
        yield engine
    check_engine(engine.engine)
    assert (engine.engine.num_requests, engine.engine.pages.num_taken) == (0, 0)


def slow_engine(**settings: Any) -> Any:
    """Return an engine whose forwards give other threads time to come in."""
    settings = {"drafter": NGramDrafter, "after_forward": lambda: time.sleep(0.0005), **settings}
    return fake_engine(**settings)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_share_forwards_and_each_gets_its_own_text(threaded: ThreadedEngine) -> None:
    prompts = [[i, i + 3, 2 * i] for i in range(24)]

    def ask(prompt: list[int]) -> list[int]:
        if prompt[0] % 2:
            return threaded.generate([prompt], SamplingParams(max_tokens=40))[0].token_ids
        stream = threaded.stream(prompt, SamplingParams(max_tokens=40))
        return [i for chunk in stream for i in chunk.token_ids]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts, timeout=PATIENCE_S))
    assert answers == [continuation(prompt, 40) for prompt in prompts]
    assert max(len(set(rows.sequences)) for rows in forwards(threaded.engine)) > 2


def test_several_prompts_and_choices_come_back_in_order(threaded: ThreadedEngine) -> None:
    params = [SamplingParams(max_tokens=i + 1, n=1 + i % 3, temperature=0.0) for i in range(6)]
    replies = threaded.generate([[i, i] for i in range(6)], params)
    expected = [continuation([i, i], i + 1) for i, p in enumerate(params) for _ in range(p.n)]
    assert [reply.token_ids for reply in replies] == expected


def test_an_abandoned_stream_is_cancelled(threaded: ThreadedEngine) -> None:
    engine = threaded.engine
    closed = threaded.stream([1, 2, 3], LONG)
    next(closed)
    closed.close()
    eventually(lambda: engine.num_requests == 0)

    def take_one() -> None:
        next(threaded.stream([3, 2, 1], LONG))

    thread = threading.Thread(target=take_one)
    thread.start()
    thread.join(PATIENCE_S)
    gc.collect()
    eventually(lambda: engine.num_requests == 0)
    assert engine.stats.cancelled == 2
    assert threaded.generate([[1, 2]], SamplingParams(max_tokens=5))[0].token_ids == continuation(
        [1, 2], 5
    )


def test_a_stream_that_is_never_read_queues_nothing(threaded: ThreadedEngine) -> None:
    threaded.stream([1, 2, 3], LONG).close()
    threaded.generate([[1]], SamplingParams(max_tokens=1))
    assert threaded.engine.stats.cancelled == 0


def test_a_wrong_request_is_refused_in_its_own_thread(threaded: ThreadedEngine) -> None:
    with pytest.raises(RequestError, match="at least 1 token"):
        threaded.generate([[1], []])
    with pytest.raises(RequestError, match="max_tokens"):
        threaded.stream([1], SamplingParams(max_tokens=0))


def test_receivers_get_chunks_and_one_that_fails_is_cancelled(threaded: ThreadedEngine) -> None:
    items: list[Item] = []
    threaded.submit([1, 2, 3], SamplingParams(max_tokens=9), items.append)

    def fail(_: Item) -> None:
        raise OSError("the client is gone")

    threaded.submit([5, 5], LONG, fail)
    request_id = threaded.submit([4, 4, 4], LONG, items.append)
    threaded.cancel(request_id)
    eventually(
        lambda: sum(not isinstance(i, Exception) and i.reply is not None for i in items) == 2
    )
    eventually(lambda: threaded.engine.num_requests == 0)
    assert threaded.engine.stats.cancelled == 2


def test_a_failing_step_ends_its_requests_and_the_next_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_broken = threading.Event()

    def fail() -> None:
        if is_broken.is_set():
            raise RuntimeError("lost")

    with ThreadedEngine(slow_engine(after_forward=fail)) as threaded:
        is_broken.set()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(threaded.generate, [[i]], LONG) for i in range(4)]
            for future in asked:
                with pytest.raises(SlipstreamError, match="dropped when a step of it failed"):
                    future.result(PATIENCE_S)
        is_broken.clear()
        (reply,) = threaded.generate([[1, 2]], SamplingParams(max_tokens=5))
        assert reply.token_ids == continuation([1, 2], 5)
    assert "a step failed" in caplog.text


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    threaded = ThreadedEngine(slow_engine(after_forward=lambda: time.sleep(0.01)))
    stream = threaded.stream([1, 2, 3], LONG)
    next(stream)
    threaded.close()
    threaded.close()
    with pytest.raises(SlipstreamError, match="closed"):
        list(stream)
    with pytest.raises(SlipstreamError, match="closed"):
        threaded.generate([[1]])
    with pytest.raises(SlipstreamError, match="closed"):
        next(threaded.stream([1]))
    assert threaded.engine.pages.num_taken == 0


def test_threads_that_come_and_go_at_random_leave_nothing_behind(
    threaded: ThreadedEngine,
) -> None:
    def visit(number: int) -> None:
        prompt = [number % 7, 1, 2, number % 3] * 6
        params = SamplingParams(max_tokens=1 + number % 40)
        got: list[int] = []
        stream = threaded.stream(prompt, params)
        for chunk in stream:
            got += chunk.token_ids
            if number % 3 == 0 and len(got) > number % 11:
                break
        stream.close()
        assert got == continuation(prompt, len(got))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(200), timeout=PATIENCE_S))
    eventually(lambda: threaded.engine.num_requests == 0)


def test_a_read_sees_the_engine_between_two_steps(threaded: ThreadedEngine) -> None:
    seen: list[tuple[int, int]] = []

    def reader(engine: Any) -> int:
        assert threading.current_thread().name == "slipstream-engine"
        check_engine(engine)
        seen.append((engine.stats.steps, len(engine.running)))
        return engine.stats.completion_tokens

    stream = threaded.stream([1, 2, 3], LONG)
    next(stream)
    tokens = [threaded.read(reader) for _ in range(20)]
    assert tokens == sorted(tokens)
    assert {running for _, running in seen} <= {0, 1}
    stream.close()
    assert isinstance(threaded.read(reader), int)


def test_what_a_reader_raises_reaches_who_asked_and_nobody_else(threaded: ThreadedEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        threaded.read(lambda engine: 1 // 0)
    assert threaded.generate([[1, 2]], SamplingParams(max_tokens=5))[0].token_ids


def test_a_closed_engine_can_still_be_read() -> None:
    engine = ThreadedEngine(slow_engine())
    engine.generate([[1, 2]], SamplingParams(max_tokens=5))
    engine.close()
    assert engine.read(lambda core: core.stats.completion_tokens) == 5


def test_a_read_gives_up_on_a_step_that_does_not_end() -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        go_on.wait(PATIENCE_S)

    engine = ThreadedEngine(slow_engine(after_forward=hang))
    engine.submit([1, 2], SamplingParams(max_tokens=2), lambda item: None)
    assert stuck.wait(PATIENCE_S)
    with pytest.raises(TimeoutError):
        engine.read(lambda core: core.stats.steps, timeout_s=0.05)
    go_on.set()
    assert engine.read(lambda core: core.stats.steps) >= 1
    engine.close()
