"""An assistant changes the clock and nothing else, whatever comes between its rounds.

A random head of a tiny target, through the engine, on every back end: text is that of a run without
drafting, for greedy and sampled requests, alone and together, across cancels, cached prefixes,
failures and rounds that it sits out (pitfalls, batch and drafter state).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.assistant import AssistantHead
from slipstream.drafters.base import Ask, Chosen
from slipstream.engine.engine import Engine
from slipstream.engine.load import choose_drafters
from slipstream.engine.target import build_target
from slipstream.errors import ConfigError
from slipstream.types import Reply, SamplingParams
from tests.drafting import make_assistant
from tests.fake_model import FakeTokenizer
from tests.tiny import BACKENDS, make_backend, tiny_arch, tiny_tensors, tiny_weights

ARCH = tiny_arch(context_len=128)
PROMPTS = (
    [*range(20, 36), 3, 9, 27, 81, 50, 53, 62, 89, 73, 25, 75, 31, 93, *range(20, 36)],
    [5],
    [*range(20, 52), 7, 7, 7],  # shares a page with the first
    [96, 1] * 20,
)
COUNT = 40


def tiny_engine(
    backend_name: str,
    *,
    threads: int = 0,
    assistant: bool = True,
    drafter: str = "assistant",
    **settings: Any,
) -> Engine:
    """Return an engine whose target has an assistant, or has none.

    With drafter "auto" n-gram lookup drafts beside it.
    """
    tensors = tiny_tensors(ARCH)
    config = EngineConfig(drafter=drafter if assistant else "none", **settings)
    options = {"threads": threads} if backend_name.startswith("cpu") else {}
    target = build_target(
        ARCH,
        make_backend(backend_name, **options),
        lambda backend: tiny_weights(backend, tensors),
        config,
        assistant=make_assistant(ARCH) if assistant else None,
    )
    makers = choose_drafters(config, target)
    return Engine(target, FakeTokenizer(), config=config, make_drafters=makers)


def params(index: int = 0, **changes: Any) -> SamplingParams:
    """Return greedy parameters for even requests, sampled ones for odd."""
    sampled = {"temperature": 0.9, "seed": 100 + index} if index % 2 else {}
    return SamplingParams(**({"max_tokens": COUNT, "ignore_eos": True} | sampled | changes))


@cache
def expected(backend_name: str, index: int, temperature: float | None = None) -> list[int]:
    """Return what a run without an assistant says to one of the prompts, alone."""
    changes = {} if temperature is None else {"temperature": temperature, "seed": 9}
    engine = tiny_engine(backend_name, assistant=False)
    (reply,) = engine.generate([PROMPTS[index]], params(index, **changes))
    return reply.token_ids


def drafted(replies: Sequence[Reply]) -> int:
    return sum(reply.speculation.drafted for reply in replies)


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 2, 4, 8, "auto"])
def test_text_does_not_depend_on_k(backend_name: str, k: Any, temperature: float) -> None:
    engine = tiny_engine(backend_name, k=k)
    asked = params(temperature=temperature, seed=9)
    replies = engine.generate([PROMPTS[0]], asked)
    assert replies[0].token_ids == expected(backend_name, 0, temperature)
    if k != "auto":
        assert drafted(replies) > COUNT // 2
        assert engine.target.head is not None
        assert not engine.target.head.declined
    assert engine.pages.num_taken == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_text_does_not_depend_on_threads(threads: int) -> None:
    engine = tiny_engine("cpu-auto", threads=threads, k=4)
    assert engine.generate([PROMPTS[0]], params())[0].token_ids == expected("cpu-auto", 0)


def together(engine: Engine) -> list[list[int]]:
    """Submit every prompt and step until all are done, requests joining one by one."""
    ids: list[int] = []
    found: dict[int, list[int]] = {}
    while len(found) < len(PROMPTS):
        if len(ids) < len(PROMPTS):
            ids.append(engine.submit(PROMPTS[len(ids)], params(len(ids))))
        for output in engine.step():
            if output.chunk.reply is not None:
                found[output.request_id] = output.chunk.reply.token_ids
    return [found[i] for i in ids]


# Requests join while others draft, chunks of prompts ride along, and one step of three has no room
# for everybody's drafts.
@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("chunk", [7, 64])
def test_text_does_not_depend_on_batch_mates(backend_name: str, chunk: int, rows: int) -> None:
    engine = tiny_engine(backend_name, k=4, prefill_chunk=chunk, max_batch_rows=rows)
    texts = [expected(backend_name, i) for i in range(len(PROMPTS))]
    assert together(engine) == texts
    assert together(engine) == texts  # on cached prefixes now
    assert engine.stats.cached_tokens > 0
    assert engine.target.head is not None
    assert not engine.target.head.declined


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4, 12, "auto"])
def test_text_does_not_depend_on_who_drafts(backend_name: str, k: Any, temperature: float) -> None:
    """Lookup and assistant by turns, alone and in batches; 12 is more than a head drafts."""
    engine = tiny_engine(backend_name, drafter="auto", k=k)
    asked = params(temperature=temperature, seed=9)
    replies = engine.generate([PROMPTS[0]], asked)
    assert replies[0].token_ids == expected(backend_name, 0, temperature)
    assert together(engine) == [expected(backend_name, i) for i in range(len(PROMPTS))]
    report = replies[0].speculation
    assert list(report.sources) == ["ngram", "assistant"]
    if k != "auto":
        assert report.drafted == sum(source["drafted"] for source in report.sources.values()) > 0


def test_a_sequence_may_sit_out_rounds(backend_name: str) -> None:
    # A stale drafter's acceptance collapses on resume (TensorRT-LLM 16888): this one has no state.
    engine = tiny_engine(backend_name, k=4)
    head = engine.target.head
    assert head is not None
    asks: list[Ask] = []
    propose = head.propose

    def moody(asked: Sequence[Ask]) -> list[list[int]]:
        asks.extend(asked)
        offered = propose(asked)
        return [tokens if len(asks) % 3 else [] for tokens in offered]

    head.propose = moody  # type: ignore[method-assign]
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.token_ids == expected(backend_name, 0)
    assert 0 < reply.speculation.rounds < len(asks)
    assert not head.declined


def test_drafts_are_those_of_a_run_that_never_paused(backend_name: str) -> None:
    def proposals(skip: int) -> dict[int, list[int]]:
        engine = tiny_engine(backend_name, k=3)
        head, found = engine.target.head, {}
        assert head is not None
        propose = head.propose

        def watched(asked: Sequence[Ask]) -> list[list[int]]:
            (ask,), (tokens,) = asked, propose(asked)
            found[len(ask.token_ids)] = tokens
            return [tokens if len(found) % skip == 0 else []]

        head.propose = watched  # type: ignore[method-assign]
        engine.generate([PROMPTS[0]], params())
        return found

    always, seldom = proposals(1), proposals(4)
    both = always.keys() & seldom.keys()
    assert len(both) > 10
    # Near its end a reply asks for fewer.
    assert all(always[n][:1] == seldom[n][:1] for n in both)
    assert [always[n] for n in sorted(both)[:-3]] == [seldom[n] for n in sorted(both)[:-3]]


def test_a_cancelled_request_leaves_nothing_behind(backend_name: str) -> None:
    # A client gone in mid-round wedged an engine for ever (oMLX 2235).
    engine = tiny_engine(backend_name, k=4)
    for _ in range(20):
        first = engine.submit(PROMPTS[3], params(3))
        second = engine.submit(PROMPTS[1], params(1))
        for _ in range(4):
            engine.step()
        engine.cancel(first)
        engine.step()
        engine.cancel(second)
    assert engine.pages.num_taken == 0
    assert engine.generate([PROMPTS[0]], params())[0].token_ids == expected(backend_name, 0)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_round_never_exceeds_what_remains(backend_name: str, limit: int) -> None:
    # k <= remaining - 1: max_tokens 1, 2, 3 with a wider k emit exactly that many.
    engine = tiny_engine(backend_name, k=7)
    (reply,) = engine.generate([PROMPTS[0]], params(max_tokens=limit))
    assert reply.token_ids == expected(backend_name, 0)[:limit]


def test_a_reply_to_the_very_end_of_the_context_is_the_classic_one(backend_name: str) -> None:
    # A drafter whose context ends first read beyond its tables (vllm 57941).
    asked = SamplingParams(max_tokens=1000, ignore_eos=True)
    replies = [
        tiny_engine(backend_name, assistant=k > 0, k=k).generate([PROMPTS[0]], asked)[0]
        for k in (0, 8)
    ]
    assert replies[0].token_ids == replies[1].token_ids
    assert len(replies[0].token_ids) == ARCH.context_len - len(PROMPTS[0])


def test_a_head_that_fails_costs_its_requests_their_drafts_alone(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=4)
    head = engine.target.head
    assert head is not None

    def fails(asked: Sequence[Ask]) -> list[list[int]]:
        raise RuntimeError("out of luck")

    head.propose = fails  # type: ignore[method-assign]
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.token_ids == expected(backend_name, 0)
    assert "RuntimeError: out of luck" in reply.speculation.reason
    assert engine.pages.num_taken == 0


def test_an_anchor_that_the_last_step_did_not_choose_is_declined(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=4)
    head = engine.target.head
    assert head is not None
    propose = head.propose

    def after_another_step(asked: Sequence[Ask]) -> list[list[int]]:
        engine.target.step.runs += 1  # as a forward outside serving would
        return propose(asked)

    head.propose = after_another_step  # type: ignore[method-assign]
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.token_ids == expected(backend_name, 0)
    assert reply.speculation.drafted == 0
    assert set(head.declined) == {"the target's last step did not choose the anchor"}


def test_a_fixed_k_beyond_the_head_is_refused() -> None:
    # fixed:K above a ceiling was silently less: a requested 8 ran at 4.
    with pytest.raises(ConfigError, match=r"k must be in \[0, 8\] with this drafter, got 9"):
        tiny_engine("cpu-auto", k=9)


def test_what_a_head_declines_has_a_reason() -> None:
    head = AssistantHead(
        lambda rows: pytest.fail("nothing is drafted"),  # type: ignore[arg-type]
        type("Step", (), {"runs": 3})(),
        max_k=8,
        max_rows=2,
        max_len=4,
    )

    def ask(length: int, chosen: Chosen | None) -> Ask:
        return Ask(
            drafter=head.drafter(),
            token_ids=[1] * length,
            k=2,
            pages=np.zeros(1, np.int32),
            chosen=chosen,
            temperature=0.0,
            seed=0,
            choice=0,
        )

    asks = [
        ask(2, None),
        ask(2, Chosen(run=2, row=0, position=1)),
        ask(3, Chosen(run=3, row=0, position=1)),
        ask(1, Chosen(run=3, row=0, position=0)),
        ask(5, Chosen(run=3, row=0, position=4)),
    ]
    assert head.propose(asks) == [[]] * 5
    assert sorted(head.declined.values()) == [1, 1, 3]
