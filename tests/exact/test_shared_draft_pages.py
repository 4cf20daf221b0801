"""What a draft model has read for one request it does not read again for the next, and is right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream.drafters.base import Ask
from slipstream.engine.calibrate import time_reading
from slipstream.engine.engine import Engine
from slipstream.engine.prefix import Node
from slipstream.kernels.ops import PAGE_SIZE, Rows
from slipstream.policy.base import StepOutcome
from slipstream.types import SamplingParams
from tests.draft_models import ARCH, DRAFTS, head_of, num_taken, pages_of, tiny_engine
from tests.engine_checks import check_cache, nodes_of
from tests.tiny import BACKENDS, make_backend, make_rows, tiny_model

DRAW = random.Random(5)
BEGINNING = [DRAW.randrange(90) for _ in range(40)]
PROMPT = [*BEGINNING, *(DRAW.randrange(90) for _ in range(20))]
PAGES_OF_PROMPT = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE  # positions of whole pages
COUNT = 16


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": COUNT, "ignore_eos": True} | changes))


@cache
def expected(backend_name: str, prompt: tuple[int, ...], temperature: float = 0.0) -> list[int]:
    engine = tiny_engine(backend_name, paid="none", prefix_cache="off")
    (reply,) = engine.generate([list(prompt)], params(temperature=temperature, seed=3))
    return reply.token_ids


@dataclass
class Seen:
    """What a draft model was fed, call for call, and what its rounds say that it caught up with."""

    rows: list[int] = field(default_factory=list)
    caught_up: int = 0


def watch(engine: Engine) -> Seen:
    """Note every forward of an engine's draft model."""
    head, seen = head_of(engine), Seen()
    step = head._step

    def watched(rows: Rows) -> Any:
        seen.rows.append(len(rows.token_ids))
        return step(rows)

    def observe(outcome: StepOutcome) -> None:
        seen.caught_up += outcome.caught_up

    head._step = watched  # type: ignore[assignment]
    engine.observers.append(observe)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", sorted(DRAFTS))
def test_a_repeated_prompt_is_read_but_for_its_last_page(
    backend_name: str, draft: str, temperature: float
) -> None:
    engine = tiny_engine(backend_name, draft=draft, k=3)
    asked = params(temperature=temperature, seed=3)
    behind = []
    for _ in range(3):
        seen = watch(engine)
        (reply,) = engine.generate([PROMPT], asked)
        assert reply.token_ids == expected(backend_name, tuple(PROMPT), temperature)
        behind.append(seen.caught_up)
        check_cache(pages_of(engine))
    # Every draft reads the anchor and the token before it.
    assert behind == [len(PROMPT) - 1] + 2 * [len(PROMPT) - 1 - PAGES_OF_PROMPT]
    assert num_taken(engine) == (0, 0)


@pytest.mark.parametrize("draft", sorted(DRAFTS))
def test_cached_pages_hold_what_a_cold_run_writes(backend_name: str, draft: str) -> None:
    engine = tiny_engine(backend_name, draft=draft, k=4, max_num_seqs=3)
    pool = pages_of(engine)
    prompts = [PROMPT, [*BEGINNING, 1, 2, 3], [*PROMPT[:33], 9] * 2]
    engine.generate(prompts, params(max_tokens=40))
    nodes = nodes_of(pool.cache.root) if pool.cache else []
    assert len(nodes) > 8
    cold = tiny_model(make_backend(backend_name), DRAFTS[draft](), max_rows=128)
    for node in nodes:
        text = text_of(node)
        pages = list(range(len(text) // PAGE_SIZE))
        cold.step(make_rows(text, range(len(text)), [pages], logit_rows=[]))
        for layer in range(cold.arch.num_layers):
            got = pool._kv.read(layer, node.page)
            for one, other in zip(got, cold.kv.read(layer, pages[-1]), strict=True):
                assert np.array_equal(one, other)


def text_of(node: Node) -> list[int]:
    """Return all tokens up to the end of a page."""
    return [] if node.parent is None else [*text_of(node.parent), *node.token_ids]


def drafts_of(engine: Engine) -> dict[int, list[int]]:
    """Return what is drafted behind how many tokens."""
    head, found = head_of(engine), {}
    propose = head.propose

    def watched(asked: list[Ask]) -> list[list[int]]:
        answers = propose(asked)
        for ask, tokens in zip(asked, answers, strict=True):
            found[len(ask.token_ids)] = tokens
        return answers

    head.propose = watched  # type: ignore[method-assign, assignment]
    engine.generate([PROMPT], params())
    head.propose = propose  # type: ignore[method-assign]
    return found


def test_drafts_on_shared_pages_are_those_of_a_cold_run(backend_name: str) -> None:
    cold = drafts_of(tiny_engine(backend_name, draft="other", k=3, prefix_cache="off"))
    engine = tiny_engine(backend_name, draft="other", k=3)
    assert drafts_of(engine) == cold
    assert drafts_of(engine) == cold


@pytest.mark.parametrize("chunk", [8, 40, 256])
def test_what_several_would_read_in_one_call_is_read_once(backend_name: str, chunk: int) -> None:
    engine = tiny_engine(backend_name, k=2, prefill_chunk=chunk, max_num_seqs=4)
    seen = watch(engine)
    asked = params(n=4, temperature=1.0, seed=3)
    replies = engine.generate([PROMPT], asked)
    plain = tiny_engine(backend_name, paid="none").generate([PROMPT], asked)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in plain]
    own = len(PROMPT) + 1 - PAGES_OF_PROMPT  # of each, in the page of its last token
    said = 3 if chunk > 8 else COUNT  # while it waited for the others' chunks
    assert seen.caught_up <= PAGES_OF_PROMPT + 4 * (own + said)
    assert sum(seen.rows) >= seen.caught_up


def test_who_waits_for_a_page_reads_it_where_the_other_has_gone(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=2, prefill_chunk=20, max_num_seqs=2)
    first, second = (engine.submit(PROMPT, params()) for _ in range(2))
    pool = pages_of(engine)
    while not pool.num_published:
        engine.step()
    assert head_of(engine).declined["the draft model is still reading"] > 0
    engine.cancel(first)
    ids = [
        token
        for request in engine.running
        for token in request.sequence.output_ids
        if request.id == second
    ]
    drafted = 0
    while engine.num_requests:
        for output in engine.step():
            ids += output.chunk.token_ids
            if output.chunk.reply is not None:
                drafted = output.chunk.reply.speculation.drafted
    assert ids == expected(backend_name, tuple(PROMPT))
    assert drafted > 0
    assert num_taken(engine) == (0, 0)


def test_off_means_that_nothing_is_shared(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=3, prefix_cache="off")
    for _ in range(2):
        seen = watch(engine)
        engine.generate([PROMPT], params())
        assert seen.caught_up == len(PROMPT) - 1
    assert pages_of(engine).num_published == 0


def test_what_is_timed_is_neither_found_nor_left_in_the_cache(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=3)
    head, pool = head_of(engine), pages_of(engine)
    for drafter, published in ((head.drafter(), 3), (head.drafter(shares=False), 0)):
        before = pool.num_published
        ask = Ask(
            drafter=drafter,
            token_ids=PROMPT[:50],
            k=1,
            pages=np.zeros(0, np.int32),
            chosen=None,
            temperature=0.0,
            seed=0,
            choice=0,
        )
        assert drafter.behind(ask.token_ids) == 48
        assert head.propose([ask])[0]
        assert pool.num_published == before + published
        drafter.release()
    before = pool.num_published
    assert time_reading(head, 0.0) is not None
    assert pool.num_published == before


@pytest.mark.parametrize("seed", range(4))
def test_few_pages_many_requests_and_cancels(backend_name: str, seed: int) -> None:
    # Ten pages for three sequences of up to seven: cached pages are given up all the time.
    draw = random.Random(seed)
    engine = tiny_engine(
        backend_name, k=draw.choice([2, 5]), kv_tokens=10 * PAGE_SIZE, max_num_seqs=3
    )
    pool = pages_of(engine)
    wanted: dict[int, tuple[int, ...]] = {}
    ids: dict[int, list[int]] = {}
    cancelled = 0
    for _ in range(150):
        if len(wanted) < 30 and draw.random() < 0.4:
            cut = draw.choice([16, 32, 40, 60])
            prompt = (*PROMPT[:cut], *(draw.randrange(3) for _ in range(draw.randint(0, 4))))
            number = engine.submit(list(prompt), params())
            wanted[number], ids[number] = prompt, []
        for output in engine.step():
            ids[output.request_id] += output.chunk.token_ids
        if engine.num_requests and draw.random() < 0.05:
            engine.cancel(draw.choice([request.id for request in engine.running]))
            cancelled += 1
        check_cache(pool)
    while engine.num_requests:
        for output in engine.step():
            ids[output.request_id] += output.chunk.token_ids
    assert len(wanted) > 20
    assert num_taken(engine) == (0, 0)
    whole = [number for number in wanted if len(ids[number]) == COUNT]
    assert len(whole) >= len(wanted) - cancelled
    for number, prompt in wanted.items():
        text = expected(backend_name, prompt)
        assert ids[number] == text[: len(ids[number])]
    assert pool.num_published > 10


def test_a_conversation_reads_what_was_added_alone(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=3)
    text = BEGINNING
    for turn in range(4):
        seen = watch(engine)
        (reply,) = engine.generate([text], params(max_tokens=12))
        if turn:
            assert seen.caught_up <= 12 + 4 + 2 * PAGE_SIZE
        text = [*text, *reply.token_ids, 1, 2, 3, 4]
    assert len(text) < ARCH.context_len
