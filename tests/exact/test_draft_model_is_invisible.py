"""A draft model changes the clock and nothing else, whatever comes between its rounds.

Tiny random models through the engine, on every back end. A draft model that is the target itself is
right every time, one of other rounding most of the time, one of another seed hardly ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from slipstream.drafters.base import Ask
from slipstream.engine.engine import Engine
from slipstream.kernels.ops import Rows
from slipstream.types import MAX_K, Reply, SamplingParams
from tests.draft_models import ARCH, DRAFTS, head_of, num_taken, pages_of, tiny_engine
from tests.tiny import BACKENDS, tiny_arch

PROMPTS = (
    [*range(20, 36), 3, 9, 27, 81, 50, 53, 62, 89, 73, 25, 75, 31, 93, *range(20, 36)],
    [5],
    [*range(20, 52), 7, 7, 7],  # shares a page with the first
    [96, 1] * 20,
)
COUNT = 40


def params(index: int = 0, **changes: Any) -> SamplingParams:
    """Return greedy parameters for even requests, sampled ones for odd."""
    sampled = {"temperature": 0.9, "seed": 100 + index} if index % 2 else {}
    return SamplingParams(**({"max_tokens": COUNT, "ignore_eos": True} | sampled | changes))


@cache
def expected(backend_name: str, index: int, temperature: float | None = None) -> list[int]:
    """Return what a run without a drafter says to one of the prompts, alone."""
    changes = {} if temperature is None else {"temperature": temperature, "seed": 9}
    engine = tiny_engine(backend_name, paid="none")
    (reply,) = engine.generate([PROMPTS[index]], params(index, **changes))
    return reply.token_ids


def rates(reply: Reply) -> tuple[int, int]:
    """Return how many drafts were accepted, and how many there were."""
    return reply.speculation.accepted, reply.speculation.drafted


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("paid", "drafter"),
    [
        ("none", "none"),
        ("none", "ngram"),
        ("assistant", "assistant"),
        ("draft_model", "x9"),
        ("draft_model", "ngram+x9"),
    ],
)
def test_text_does_not_depend_on_the_drafter(
    backend_name: str, paid: str, drafter: str, temperature: float
) -> None:
    for k in (3, "auto"):
        engine = tiny_engine(backend_name, paid=paid, drafter=drafter, k=k)
        asked = params(temperature=temperature, seed=9)
        (reply,) = engine.generate([PROMPTS[0]], asked)
        assert reply.token_ids == expected(backend_name, 0, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", sorted(DRAFTS))
@pytest.mark.parametrize("k", [*range(9), 11, MAX_K, "auto"])
def test_text_does_not_depend_on_k(
    backend_name: str, k: Any, draft: str, temperature: float
) -> None:
    engine = tiny_engine(backend_name, draft=draft, k=k)
    (reply,) = engine.generate([PROMPTS[0]], params(temperature=temperature, seed=9))
    assert reply.token_ids == expected(backend_name, 0, temperature)
    if k not in ("auto", 0):
        assert reply.speculation.drafted >= COUNT // 3
        assert not head_of(engine).declined
    assert num_taken(engine) == (0, 0)


@pytest.mark.parametrize("k", [1, 4, MAX_K])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.3, "seed": 2, "top_p": 0.8},
        {"temperature": 1.0, "seed": 3, "top_k": 5, "min_p": 0.05},
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    backend_name: str, k: int, sampling: dict[str, Any]
) -> None:
    engine = tiny_engine(backend_name, draft="itself", k=k)
    (reply,) = engine.generate([PROMPTS[0]], params(**sampling))
    accepted, drafted = rates(reply)
    assert accepted == drafted >= COUNT // 3


def test_drafts_that_are_sometimes_right_are_sometimes_kept(backend_name: str) -> None:
    (reply,) = tiny_engine(backend_name, k=4).generate([PROMPTS[0]], params())
    accepted, drafted = rates(reply)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_text_does_not_depend_on_threads(threads: int) -> None:
    engine = tiny_engine("cpu-auto", threads=threads, k=4)
    assert engine.generate([PROMPTS[0]], params())[0].token_ids == expected("cpu-auto", 0)


def together(engine: Engine, **changes: Any) -> list[Reply]:
    """Submit every prompt and step until all are done, requests joining one by one."""
    ids: list[int] = []
    found: dict[int, Reply] = {}
    while len(found) < len(PROMPTS):
        if len(ids) < len(PROMPTS):
            ids.append(engine.submit(PROMPTS[len(ids)], params(len(ids), **changes)))
        for output in engine.step():
            if output.chunk.reply is not None:
                found[output.request_id] = output.chunk.reply
    return [found[i] for i in ids]


@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("drafter", ["x9", "ngram+x9"])
def test_text_does_not_depend_on_batch_mates(
    backend_name: str, drafter: str, chunk: int, rows: int
) -> None:
    engine = tiny_engine(
        backend_name, drafter=drafter, k=4, prefill_chunk=chunk, max_batch_rows=rows
    )
    texts = [expected(backend_name, i) for i in range(len(PROMPTS))]
    assert [reply.token_ids for reply in together(engine)] == texts
    assert [reply.token_ids for reply in together(engine)] == texts  # on cached prefixes now
    assert num_taken(engine) == (0, 0)
    reading = {"the draft model is still reading"} if chunk == 7 else set()
    assert set(head_of(engine).declined) == reading


def drafts_by_length(
    engine: Engine, prompts: Sequence[Sequence[int]], mute: Callable[[int], bool] = lambda n: False
) -> dict[tuple[int, int], list[int]]:
    """Return what was drafted for each prompt behind how many tokens.

    Args:
        mute: tells for which calls a sequence is not heard, as if its round drafted nothing.
    """
    head = head_of(engine)
    propose, found = head.propose, {}
    calls = 0
    starts = {tuple(prompt[:4]): index for index, prompt in enumerate(prompts)}

    def watched(asked: Sequence[Ask]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        heard = [ask for ask in asked if not mute(calls + starts[tuple(ask.token_ids[:4])])]
        offered = iter(propose(heard))
        answers = [next(offered) if ask in heard else [] for ask in asked]
        for ask, tokens in zip(asked, answers, strict=True):
            if tokens:
                found[starts[tuple(ask.token_ids[:4])], len(ask.token_ids)] = tokens
        return answers

    head.propose = watched  # type: ignore[method-assign]
    engine.generate([list(prompt) for prompt in prompts], params())
    return found


def agree(some: dict[tuple[int, int], list[int]], other: dict[tuple[int, int], list[int]]) -> bool:
    """Tell whether drafts behind the same text begin alike, as far as both go."""
    both = some.keys() & other.keys()
    assert len(both) > 10
    return all(
        all(a == b for a, b in zip(some[place], other[place], strict=False)) for place in both
    )


def test_drafts_depend_neither_on_k_nor_on_batch_mates(backend_name: str) -> None:
    alone = drafts_by_length(tiny_engine(backend_name, k=1), PROMPTS[:1])
    wide = drafts_by_length(tiny_engine(backend_name, k=3), PROMPTS[:1])
    joined = drafts_by_length(tiny_engine(backend_name, k=5), [PROMPTS[0], PROMPTS[3]])
    assert agree(alone, wide)
    assert agree(alone, {place: joined[place] for place in joined if place[0] == 0})


@pytest.mark.parametrize("chunk", [8, 256])
def test_a_drafter_that_paused_is_caught_up_before_it_drafts(backend_name: str, chunk: int) -> None:
    # A stale drafter's acceptance collapses on resume (TensorRT-LLM 16888).
    always = drafts_by_length(tiny_engine(backend_name, k=3), PROMPTS[:1])
    pauses = tiny_engine(backend_name, k=3, prefill_chunk=chunk)
    seldom = drafts_by_length(pauses, PROMPTS[:1], lambda call: call % 9 < 4)
    both = always.keys() & seldom.keys()
    assert len(both) > 3
    assert all(always[place][:1] == seldom[place][:1] for place in both)


def test_a_model_that_drafts_for_itself_is_right_after_every_pause(backend_name: str) -> None:
    engine = tiny_engine(backend_name, draft="itself", k=3)
    head, draw = head_of(engine), random.Random(3)
    propose = head.propose
    head.propose = lambda asked: (  # type: ignore[method-assign]
        [[] for _ in asked] if draw.random() < 0.6 else propose(asked)
    )
    (reply,) = engine.generate([PROMPTS[0]], params())
    accepted, drafted = rates(reply)
    assert accepted == drafted > 10
    assert reply.token_ids == expected(backend_name, 0)


def test_a_prompt_is_not_read_before_somebody_asks(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=4)
    head = head_of(engine)
    engine.submit(PROMPTS[0], params(k=0))
    for _ in range(5):
        engine.step()
    assert num_taken(engine)[1] == 0
    assert not head.declined


def test_one_call_reads_one_chunk_at_most() -> None:
    engine = tiny_engine("cpu-auto", k=4, prefill_chunk=16, prefix_cache="off")
    head = head_of(engine)
    widest, step = 0, head._step

    def watched(rows: Rows) -> Any:
        nonlocal widest
        widest = max(widest, len(rows.token_ids))
        return step(rows)

    head._step = watched  # type: ignore[assignment]
    engine.generate([list(prompt) for prompt in PROMPTS], params())
    assert 16 < widest <= 16 + 2 * len(PROMPTS)


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
    assert num_taken(engine) == (0, 0)
    assert engine.generate([PROMPTS[0]], params())[0].token_ids == expected(backend_name, 0)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_round_never_exceeds_what_remains(backend_name: str, limit: int) -> None:
    engine = tiny_engine(backend_name, k=7)
    (reply,) = engine.generate([PROMPTS[0]], params(max_tokens=limit))
    assert reply.token_ids == expected(backend_name, 0)[:limit]


@pytest.mark.parametrize("k", [1, 8, MAX_K])
@pytest.mark.parametrize("context", [8, 60, 61, 64, 128])
def test_a_context_that_ends_before_the_target_s_ends_drafting_alone(
    backend_name: str, context: int, k: int
) -> None:
    # A drafter whose context ends first read beyond its tables (vllm 57941).
    asked = SamplingParams(max_tokens=1000, ignore_eos=True)
    engine = tiny_engine(backend_name, k=k, draft_arch=tiny_arch(num_layers=1, context_len=context))
    (reply,) = engine.generate([PROMPTS[0]], asked)
    (plain,) = tiny_engine(backend_name, paid="none").generate([PROMPTS[0]], asked)
    assert reply.token_ids == plain.token_ids
    assert len(reply.token_ids) == ARCH.context_len - len(PROMPTS[0])
    assert (reply.speculation.drafted > 0) == (context > len(PROMPTS[0]))
    assert num_taken(engine) == (0, 0)


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_model_that_fails_costs_its_requests_their_drafts_alone(
    backend_name: str, calls: int
) -> None:
    engine = tiny_engine(backend_name, k=4)
    head, ran = head_of(engine), 0
    step = head._step

    def fails(rows: Rows) -> Any:
        nonlocal ran
        ran += 1
        if ran > calls:
            raise RuntimeError("out of luck")
        return step(rows)

    head._step = fails  # type: ignore[assignment]
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.token_ids == expected(backend_name, 0)
    assert "RuntimeError: out of luck" in reply.speculation.reason
    assert num_taken(engine) == (0, 0)
    head._step = step
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.speculation.drafted > 0


def test_a_pool_that_is_used_up_is_declined_with_a_reason(backend_name: str) -> None:
    engine = tiny_engine(backend_name, k=4)
    head, pool = head_of(engine), pages_of(engine)
    held = pool.allocate(pool.num_free - 1)
    (reply,) = engine.generate([PROMPTS[0]], params())
    assert reply.token_ids == expected(backend_name, 0)
    assert set(head.declined) == {"no KV page is left for the draft model"}
    pool.free(held)


def test_text_with_a_token_that_the_draft_model_lacks_is_left_alone(backend_name: str) -> None:
    arch = tiny_arch(num_layers=1, context_len=128, vocab_size=90)
    engine = tiny_engine(backend_name, k=4, draft_arch=arch)
    replies = engine.generate([PROMPTS[1], PROMPTS[3]], params())
    assert replies[0].token_ids == expected(backend_name, 1, 0.0)
    assert replies[1].speculation.drafted == 0  # id 96 is in its prompt
    reason = "a token of the text is not in the draft model's vocabulary"
    assert head_of(engine).declined[reason] <= 2  # it is not asked for ever


def test_padding_rows_of_the_draft_model_are_never_drafted(backend_name: str) -> None:
    arch = tiny_arch(num_layers=1, context_len=128, vocab_size=ARCH.vocab_size + 200)
    for temperature in (0.0, 1.0):
        engine = tiny_engine(backend_name, k=4, draft_arch=arch)
        head, propose, found = head_of(engine), head_of(engine).propose, []

        def watched(asked: Sequence[Ask], propose: Any = propose, found: Any = found) -> Any:
            offered = propose(asked)
            found += [token for tokens in offered for token in tokens]
            return offered

        head.propose = watched  # type: ignore[method-assign]
        (reply,) = engine.generate([PROMPTS[0]], params(temperature=temperature, seed=9))
        assert reply.token_ids == expected(backend_name, 0, temperature)
        assert len(found) > COUNT
        assert max(found) < ARCH.vocab_size


def test_kv_of_rejected_drafts_is_never_taken_for_text() -> None:
    head = head_of(tiny_engine("cpu-auto"))
    own = head.drafter()
    own.reserve(32)
    own.read(4)
    own.drafted = [7, 8, 9]
    text = [1, 2, 3, 4]
    assert own.behind([*text, 7, 8, 5]) == 0
    assert (own.kv_len, own.drafted) == (6, [])  # 7 and 8 have KV, 5 and what follows has none
    own.read(4)
    own.drafted = [7, 8, 9]
    own.settle([*text, 7, 8, 9, 5])
    assert own.kv_len == 6  # 9 was drafted last and never fed
    own.read(4)
    own.drafted = [7, 8, 9]
    own.settle([*text, 6])
    assert (own.kv_len, own.drafted) == (4, [])
    own.read(4)
    own.drafted = [7, 8, 9]
    own.settle([*text, 7])
    assert (own.kv_len, own.drafted) == (4, [7, 8, 9])  # the anchor is read again
    own.settle([*text, 7, 8, 2])
    assert own.kv_len == 6
