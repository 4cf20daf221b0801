"""Drafter, k, padding, prefill chunks and threads change the clock, never a byte of the text.

Real forwards of a tiny random model on every back end; every run is compared with a classic one
that drafts nothing and reads its prompt in one chunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.target import build_target
from slipstream.types import SamplingParams
from tests.fake_model import FakeTokenizer, Scripted, always_wrong
from tests.tiny import BACKENDS, make_backend, tiny_arch, tiny_tensors, tiny_weights

ARCH = tiny_arch(context_len=128)
# A passage, something else, the passage again: n-grams recur, and 45 tokens span three pages.
PROMPT = [*range(20, 36), 3, 9, 27, 81, 50, 53, 62, 89, 73, 25, 75, 31, 93, *range(20, 36)]
COUNT = 40
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 15)


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


def tiny_engine(
    backend_name: str,
    drafter: Callable[[], Drafter] | None = None,
    *,
    kind: str = "q4_1",
    backend_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine around the tiny model."""
    tensors = tiny_tensors(ARCH, kind=kind)
    config = EngineConfig(**settings)
    target = build_target(
        ARCH,
        make_backend(backend_name, **(backend_options or {})),
        lambda backend: tiny_weights(backend, tensors),
        config,
    )
    makers = [drafter] if drafter else ()
    return Engine(target, FakeTokenizer(), config=config, make_drafters=makers)


def run(engine: Engine) -> tuple[list[int], list[bytes]]:
    """Generate COUNT tokens; return them and the KV of all positions but the last, layer by layer.

    The KV is read when the last round is done and before its pages are freed.
    """
    kv: list[bytes] = []
    release = engine._release

    def read_then_release(requests: Any) -> None:
        for request in requests:
            sequence = request.sequence
            assert sequence.kv_len == len(PROMPT) + COUNT - 1
            for layer in range(ARCH.num_layers):
                pages = [engine.target.kv.read(layer, int(page)) for page in sequence.pages]
                for part in zip(*pages, strict=True):
                    kv.append(np.concatenate(part)[: sequence.kv_len].tobytes())
        release(requests)

    engine._release = read_then_release  # type: ignore[method-assign]
    try:
        (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT, ignore_eos=True))
    finally:
        engine._release = release  # type: ignore[method-assign]
    assert len(reply.token_ids) == COUNT
    assert engine.pages.num_taken == 0
    return reply.token_ids, kv


@cache
def classic(backend_name: str, kind: str = "q4_1") -> tuple[list[int], list[bytes]]:
    """Return what a run without any drafting gives."""
    return run(tiny_engine(backend_name, kind=kind))


def script(backend_name: str, kind: str = "q4_1") -> list[int]:
    """Return prompt and classic continuation."""
    return PROMPT + classic(backend_name, kind)[0]


def test_the_model_says_more_than_one_thing(backend_name: str) -> None:
    # A model that repeats one token would hide any mistake.
    assert len(set(classic(backend_name)[0])) > COUNT // 3


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "right", "wrong", "uneven"])
def test_text_and_kv_do_not_depend_on_drafter_and_k(
    backend_name: str, drafter: str, k: int
) -> None:
    known = script(backend_name)
    draw = random.Random(k)
    drafters: dict[str, Callable[[], Drafter] | None] = {
        "none": None,
        "ngram": NGramDrafter,
        "right": lambda: Scripted(known),
        "wrong": lambda: Scripted(known, always_wrong),
        "uneven": lambda: Scripted(known, lambda _round, _place: draw.random() < 0.3),
    }
    assert run(tiny_engine(backend_name, drafters[drafter], k=k)) == classic(backend_name)


@pytest.mark.parametrize("pad", ["off", "4", "8", "16", "13"])
@pytest.mark.parametrize("k", [1, 4, 15])
def test_text_and_kv_do_not_depend_on_padding(backend_name: str, k: int, pad: str) -> None:
    known = script(backend_name)
    engine = tiny_engine(
        backend_name, lambda: Scripted(known, lambda n, place: place == n % 6), k=k, verify_pad=pad
    )
    assert run(engine) == classic(backend_name)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_text_and_kv_do_not_depend_on_prefill_chunks(backend_name: str, chunk: int) -> None:
    engine = tiny_engine(backend_name, NGramDrafter, prefill_chunk=chunk)
    assert run(engine) == classic(backend_name)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16"])
def test_text_and_kv_do_not_depend_on_k_in_any_weight_kind(backend_name: str, kind: str) -> None:
    known = script(backend_name, kind)
    engine = tiny_engine(
        backend_name, lambda: Scripted(known, lambda n, place: place == n % 4), kind=kind, k=6
    )
    assert run(engine) == classic(backend_name, kind)


# Nine are more than most test machines have cores: members lose theirs and steps go on alone.
@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_text_and_kv_do_not_depend_on_threads(backend_name: str, threads: int) -> None:
    if backend_name != "reference":
        engine = tiny_engine(backend_name, NGramDrafter, backend_options={"threads": threads}, k=4)
        assert run(engine) == classic(backend_name)
        return
    torch = pytest.importorskip("torch", reason="the reference back end needs torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert run(tiny_engine("reference", NGramDrafter, k=4)) == classic("reference")
        assert torch.get_num_threads() == threads  # a step gives the setting back
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["gemv", "multirow", "tile"])
def test_text_and_kv_do_not_depend_on_the_verify_kernel(kernel: str) -> None:
    engine = tiny_engine("cpu-auto", NGramDrafter, backend_options={"kernel": kernel}, k=4)
    assert run(engine) == classic("cpu-auto")


def test_a_second_request_equals_the_first(backend_name: str) -> None:
    # Its pages come back from the pool, written before.
    engine = tiny_engine(backend_name, NGramDrafter, k=8)
    assert run(engine) == run(engine) == classic(backend_name)


def test_a_request_after_a_cancelled_one_equals_a_first_one(backend_name: str) -> None:
    engine = tiny_engine(backend_name, NGramDrafter, k=8)
    stream = engine.stream([*PROMPT[::-1], *PROMPT], SamplingParams(max_tokens=30))
    for _ in range(4):
        next(stream)
    stream.close()
    assert run(engine) == classic(backend_name)


def test_a_reply_to_the_very_end_of_the_context_equals_the_classic_one(backend_name: str) -> None:
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    replies = [
        tiny_engine(backend_name, NGramDrafter, k=k).generate([PROMPT], params)[0] for k in (0, 15)
    ]
    assert replies[0].token_ids == replies[1].token_ids
    assert len(replies[0].token_ids) == ARCH.context_len - len(PROMPT)
    assert {reply.finish_reason for reply in replies} == {"length"}
