"""A sequence's tokens, text and logprobs are those of its own serial run, whoever shares its steps.

Real forwards of a tiny random model on every back end: requests that arrive and leave at any time,
with drafters that are right, wrong or uneven, greedy and sampled, with and without cached prefixes.
The serial run is alone, drafts nothing, caches nothing and reads its prompt in one chunk.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.delivery import Item
from slipstream.engine.engine import Engine
from slipstream.engine.threaded import ThreadedEngine
from slipstream.types import Chunk, DetailedReply, Reply, SamplingParams
from tests.engine_checks import check_engine
from tests.exact.test_speculation_is_invisible import PROMPT, tiny_engine
from tests.fake_model import Scripted, always_wrong
from tests.tiny import BACKENDS

Facts = tuple[list[int], str, str, Any]
COUNT = 24
# Prompts that share two pages, one, none; one is shorter than a page.
PROMPTS = (
    tuple(PROMPT),
    tuple(PROMPT[:40]),
    (*PROMPT[:32], 5, 6, 7),
    (*PROMPT[:20], 1),
    (9, 9, 9),
    tuple(PROMPT[::-1]),
    tuple(PROMPT[:33]),
    (*PROMPT[:16], *PROMPT[:16], 2),
)
PARAMS = (
    SamplingParams(max_tokens=COUNT),
    SamplingParams(max_tokens=COUNT, temperature=0.7, seed=1, top_p=0.9),
    SamplingParams(max_tokens=COUNT, temperature=1.0, seed=2, logprobs=2),
    SamplingParams(max_tokens=COUNT, repetition_penalty=1.3, logprobs=0),
    SamplingParams(max_tokens=COUNT, temperature=1.0, seed=2, top_k=20, frequency_penalty=0.3),
    SamplingParams(max_tokens=COUNT, logprobs=5),
    SamplingParams(max_tokens=COUNT, stop=("4><",)),
    SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3, n=2),
)


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


def facts(reply: Reply) -> Facts:
    """Return what must not depend on anything but prompt, parameters and seed."""
    logprobs = reply.logprobs if isinstance(reply, DetailedReply) else None
    return reply.token_ids, reply.text, reply.finish_reason, logprobs


@cache
def _serial_engine(backend_name: str) -> Engine:
    return tiny_engine(backend_name, max_num_seqs=1, prefix_cache="off", max_model_len=128)


@cache
def serial(backend_name: str, prompt: tuple[int, ...], params: SamplingParams) -> list[Facts]:
    """Return what each choice gives when it runs alone."""
    return [facts(reply) for reply in _serial_engine(backend_name).generate([prompt], params)]


def drafters(backend_name: str) -> dict[str, Callable[[], Drafter] | None]:
    """Return what makes each kind of drafter; the scripted ones know the first prompt's reply."""
    script = [*PROMPTS[0], *serial(backend_name, PROMPTS[0], PARAMS[0])[0][0]]
    draw = random.Random(5)
    return {
        "none": None,
        "ngram": NGramDrafter,
        "right": lambda: Scripted(script),
        "wrong": lambda: Scripted(script, always_wrong),
        "uneven": lambda: Scripted(script, lambda _n, _place: draw.random() < 0.3, free=True),
    }


@dataclasses.dataclass
class Visit:
    """A request, when it comes, and after how many of its chunks it leaves."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    leaves: int | None = None


def play(engine: Engine, visits: list[Visit], backend_name: str) -> int:
    """Run requests that come and go, compare all with their serial runs; return tokens compared."""
    waiting = sorted(visits, key=lambda visit: visit.arrives)
    leaving: list[int] = []
    pairs: list[tuple[Reply, Facts]] = []  # compared at the end: a receiver must not raise

    def submit(visit: Visit) -> None:
        choices = engine.check(visit.prompt, visit.params)
        texts = serial(backend_name, visit.prompt, dataclasses.replace(visit.params, k=None))
        num_chunks = 0

        def receive(item: Item) -> None:
            nonlocal num_chunks
            assert isinstance(item, Chunk)
            num_chunks += 1
            if item.reply is not None:
                pairs.append((item.reply, texts[item.choice]))
            elif num_chunks == visit.leaves:
                leaving.append(choices[0].id)

        engine.queue(choices, receive)

    step = 0
    while waiting or engine.num_requests:
        while waiting and waiting[0].arrives <= step:
            submit(waiting.pop(0))
        engine.step()
        while leaving:
            engine.cancel(leaving.pop())
        check_engine(engine)
        step += 1
    assert engine.pages.num_taken == 0
    assert len(pairs) == sum(visit.params.n for visit in visits)
    for reply, expected in pairs:
        if reply.finish_reason == "cancelled":
            assert reply.token_ids == expected[0][: len(reply.token_ids)]
        else:
            assert facts(reply) == expected
    return sum(len(reply.token_ids) for reply, _ in pairs)


@pytest.mark.parametrize(
    ("drafter", "k"),
    [("none", 0)]
    + [(name, k) for name in ("ngram", "right", "wrong", "uneven") for k in (0, 1, 4, 15)],
)
def test_each_of_eight_equals_its_serial_run(backend_name: str, drafter: str, k: int) -> None:
    make = drafters(backend_name)[drafter]
    engine = tiny_engine(backend_name, make, k=k, prefill_chunk=48, verify_pad="4")
    visits = [
        Visit(prompt, params, arrives=3 * i)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    assert play(engine, visits, backend_name) > 6 * COUNT
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("size", range(1, 9))
def test_every_batch_size_with_cancels(backend_name: str, size: int) -> None:
    make = drafters(backend_name)["uneven"]
    engine = tiny_engine(backend_name, make, max_num_seqs=size, prefill_chunk=20)
    visits = [
        Visit(
            PROMPTS[(i * 3) % 8], PARAMS[(i * 5) % 8], arrives=i, leaves=2 if i % 4 == 3 else None
        )
        for i in range(12)
    ]
    play(engine, visits, backend_name)


@pytest.mark.parametrize("params", PARAMS[:6], ids=range(6))
def test_a_cached_prefix_gives_the_bytes_of_a_cold_run(
    backend_name: str, params: SamplingParams
) -> None:
    engine = tiny_engine(backend_name, NGramDrafter)
    for _ in range(2):
        for prompt in PROMPTS[:4]:
            assert [facts(r) for r in engine.generate([prompt], params)] == serial(
                backend_name, prompt, params
            )
    assert engine.stats.cached_tokens >= 32 + 32 + 32 + 16 + 16


def test_a_continued_conversation_reuses_pages_that_verifies_wrote(backend_name: str) -> None:
    engine = tiny_engine(backend_name, drafters(backend_name)["uneven"], k=7)
    params = SamplingParams(max_tokens=COUNT, logprobs=3)
    prompt = PROMPTS[0]
    for turn in range(3):
        (reply,) = engine.generate([prompt], params)
        assert facts(reply) == serial(backend_name, prompt, params)[0]
        prompt = (*prompt, *reply.token_ids[: 20 - turn], 3)[: 128 - COUNT]
    assert engine.stats.cached_tokens >= 48 + 64


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_rows_do_not_show(threads: int) -> None:
    for rows in (8, 11, 0):
        engine = tiny_engine(
            "cpu-auto",
            drafters("cpu-auto")["uneven"],
            backend_options={"threads": threads},
            max_batch_rows=rows,
            prefill_chunk=37,
        )
        visits = [
            Visit(p, q, arrives=i) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ]
        play(engine, visits, "cpu-auto")


def test_threads_that_ask_at_once_get_their_serial_replies(backend_name: str) -> None:
    make = drafters(backend_name)["uneven"]
    pairs = [(PROMPTS[i % 8], PARAMS[i * 3 % 8]) for i in range(16)]
    expected = [serial(backend_name, *pair) for pair in pairs]
    with ThreadedEngine(tiny_engine(backend_name, make)) as engine, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(engine.generate, [prompt], params) for prompt, params in pairs]
        replies = [future.result(60) for future in asked]
    assert [[facts(reply) for reply in each] for each in replies] == expected


VISITS = st.builds(
    Visit,
    prompt=st.sampled_from(PROMPTS),
    params=st.builds(
        dataclasses.replace,
        st.sampled_from(PARAMS),
        k=st.sampled_from(["auto", "off", 1, 3, 7, 15]),
    ),
    arrives=st.integers(0, 20),
    leaves=st.sampled_from([None, None, 1, 2, 5]),
)


@pytest.mark.parametrize("backend_name", ["reference", "cpu-auto"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    visits=st.lists(VISITS, min_size=1, max_size=8),
    drafter=st.sampled_from(["none", "ngram", "right", "wrong", "uneven"]),
    num_seqs=st.integers(1, 8),
    chunk=st.sampled_from([3, 16, 50, 256]),
    rows=st.sampled_from([0, 9]),
    prefix_cache=st.sampled_from(["on", "off"]),
    kv_tokens=st.sampled_from([0, 128, 200]),
)
def test_any_visits_equal_their_serial_runs(
    backend_name: str,
    visits: list[Visit],
    drafter: str,
    num_seqs: int,
    chunk: int,
    rows: int,
    prefix_cache: str,
    kv_tokens: int,
) -> None:
    engine = tiny_engine(
        backend_name,
        drafters(backend_name)[drafter],
        max_num_seqs=num_seqs,
        prefill_chunk=chunk,
        max_batch_rows=rows,
        prefix_cache=prefix_cache,
        kv_tokens=kv_tokens,
    )
    play(engine, visits, backend_name)
