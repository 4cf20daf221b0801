"""Speculation is invisible in every family: windows, shared KV, layers of several sizes and all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.target import build_target
from slipstream.errors import LoadError
from slipstream.kernels.ops import Backend
from slipstream.models.decoder import forward
from slipstream.models.loading.weights_map import load_decoder
from slipstream.types import SamplingParams
from tests.fake_model import FakeTokenizer, Scripted, always_wrong
from tests.families import CONFIGS, WINDOW, family_arch, random_checkpoint
from tests.tiny import BACKENDS, TinyModel, make_backend, make_rows

# A passage, something else, the passage again, with the window's edge inside a page.
PROMPT = [*range(20, 36), 3, 9, 27, 81, 50, 53, 62, 89, 73, 25, 75, 31, 93, *range(20, 36)]
COUNT = 24
PAGES = [5, 2, 9, 4, 7]
LENGTH = 2 * WINDOW + 17


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def serving(backend_name: str, family: str) -> Backend:
    """Return a back end that runs a family, or skip with what it lacks."""
    backend = make_backend(backend_name)
    try:
        backend.kv_cache(family_arch(family), 1, 16)
    except LoadError as error:
        if "does not run" not in error.message:
            raise
        pytest.skip(error.message)
    return backend


def engine_of(
    backend_name: str, family: str, drafter: Callable[[], Drafter] | None = None, **settings: object
) -> Engine:
    checkpoint = random_checkpoint(family_arch(family), kind="q4_1")
    config = EngineConfig(max_model_len=128, **settings)  # type: ignore[arg-type]
    target = build_target(
        checkpoint.arch,
        serving(backend_name, family),
        lambda backend: load_decoder(checkpoint, backend),
        config,
    )
    makers = [drafter] if drafter else ()
    return Engine(target, FakeTokenizer(), config=config, make_drafters=makers)


def said(engine: Engine, temperature: float) -> list[int]:
    params = SamplingParams(
        max_tokens=COUNT, ignore_eos=True, temperature=temperature, seed=11 if temperature else None
    )
    (reply,) = engine.generate([PROMPT], params)
    assert engine.pages.num_taken == 0
    return reply.token_ids


@cache
def classic(backend_name: str, family: str, temperature: float) -> list[int]:
    return said(engine_of(backend_name, family), temperature)


def test_the_model_says_more_than_one_thing(backend_name: str, family: str) -> None:
    assert len(set(classic(backend_name, family, 1.0))) > COUNT // 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "right", "wrong", "uneven"])
def test_text_does_not_depend_on_drafter_chunk_and_padding(
    backend_name: str, family: str, drafter: str, temperature: float
) -> None:
    expected = classic(backend_name, family, temperature)
    known, draw = PROMPT + expected, random.Random(5)
    drafters: dict[str, Callable[[], Drafter]] = {
        "ngram": NGramDrafter,
        "right": lambda: Scripted(known),
        "wrong": lambda: Scripted(known, always_wrong),
        "uneven": lambda: Scripted(known, lambda _round, _place: draw.random() < 0.3),
    }
    for k, chunk, pad in ((4, 7, "8"), (15, 64, "off")):
        engine = engine_of(
            backend_name, family, drafters[drafter], k=k, prefill_chunk=chunk, verify_pad=pad
        )
        assert said(engine, temperature) == expected


def prepared(backend_name: str, family: str, chunk: int = 64) -> TinyModel:
    """Return a model that holds a random context of LENGTH tokens."""
    backend, checkpoint = (
        serving(backend_name, family),
        random_checkpoint(family_arch(family), kind="q4_1"),
    )
    weights = load_decoder(checkpoint, backend)
    kv = backend.kv_cache(checkpoint.arch, 12, 128)
    step = backend.compile(
        lambda ops: forward(ops, checkpoint.arch, weights, kv), max_rows=64, max_logits=64
    )
    ids = np.random.default_rng(1).integers(0, 97, LENGTH)
    for start in range(0, LENGTH, chunk):
        positions = range(start, min(start + chunk, LENGTH))
        step(make_rows(ids[start : start + chunk], positions, [PAGES], logit_rows=[]))
    return TinyModel(checkpoint.arch, backend, kv, step)


def test_each_row_of_a_verify_equals_its_own_classic_step(backend_name: str, family: str) -> None:
    ids = [11, 3, 60, 8, 96, 0, 12]
    positions = list(range(LENGTH, LENGTH + len(ids)))
    together = prepared(backend_name, family).step(make_rows(ids, positions, [PAGES])).logits.copy()
    serial = prepared(backend_name, family, chunk=7)
    for i, (token, position) in enumerate(zip(ids, positions, strict=True)):
        # A padding row beside it, and a row of another sequence.
        rows = make_rows(
            [token, 5, 1],
            [position, -1, 0],
            [PAGES, [0] * len(PAGES)],
            sequences=[0, 0, 1],
            logit_rows=[0],
        )
        assert serial.step(rows).logits[0].tobytes() == together[i].tobytes()


def test_rejected_drafts_leave_nothing_that_is_read(backend_name: str, family: str) -> None:
    model = prepared(backend_name, family)
    probe = make_rows([11], [LENGTH], [PAGES])
    expected = model.step(probe).logits.tobytes()
    for noise in range(3):
        model.step(make_rows([noise] * 8, range(LENGTH + 1, LENGTH + 9), [PAGES]))
        assert model.step(probe).logits.tobytes() == expected
