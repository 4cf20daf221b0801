"""Speculation with Gemma 4's assistant is invisible: its drafts change the clock alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the pair is made by transformers")

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.target import build_target
from slipstream.models.loading.folder import read_folder
from slipstream.models.loading.heads import read_head
from slipstream.models.loading.weights_map import load_decoder
from slipstream.types import SamplingParams
from tests.fake_model import FakeTokenizer
from tests.gemma4_pair import WINDOW, make_pair
from tests.tiny import BACKENDS, make_backend

# Shorter than the window, and longer than it by more than a page.
PROMPTS = [[5, 9, 33], [*range(20, 48), 3, 9, 27, 81, 50, *range(20, 36)]]
COUNT = WINDOW + 20


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "clustered"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    make_pair(path, shared=2, clustered=request.param)
    return path


def engine_of(folder: Path, backend: str, *, drafts: bool, **settings: Any) -> Engine:
    checkpoint = read_folder(folder / "target").checkpoint
    assistant = read_head(folder / "assistant", checkpoint.arch, "") if drafts else None
    config = EngineConfig(max_model_len=160, max_num_seqs=4, **settings)
    target = build_target(
        checkpoint.arch,
        make_backend(backend),
        lambda back: load_decoder(checkpoint, back),
        config,
        assistant=assistant,
    )
    makers = [] if target.head is None else [target.head.drafter]
    return Engine(target, FakeTokenizer(), config=config, make_drafters=makers)


def replies(
    engine: Engine, temperature: float, prompts: Sequence[list[int]] = PROMPTS
) -> list[Any]:
    params = SamplingParams(
        max_tokens=COUNT, ignore_eos=True, temperature=temperature, seed=3 if temperature else None
    )
    found = engine.generate(prompts, params)
    assert engine.pages.num_taken == 0
    return found


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_pair_says_what_its_target_says_alone(
    folder: Path, backend_name: str, temperature: float
) -> None:
    with engine_of(folder, backend_name, drafts=False) as engine:
        classic = [reply.token_ids for reply in replies(engine, temperature)]
    for k in (1, 4, 15):
        with engine_of(folder, backend_name, drafts=True, k=k) as engine:
            got = replies(engine, temperature)
        assert [reply.token_ids for reply in got] == classic
        assert all(reply.speculation.drafted > 0 for reply in got)


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_pair_says_the_same_in_any_company(folder: Path, backend_name: str, chunk: int) -> None:
    for temperature in (0.0, 0.9):
        with engine_of(folder, backend_name, drafts=False) as engine:
            classic = [reply.token_ids for reply in replies(engine, temperature)]
        with engine_of(folder, backend_name, drafts=True, k=4, prefill_chunk=chunk) as engine:
            found = replies(engine, temperature)
            for prompt in PROMPTS:  # alone, on cached prefixes now
                found += replies(engine, temperature, [prompt])
            assert engine.target.head is not None
            assert not engine.target.head.declined
        assert [reply.token_ids for reply in found] == classic * 2
