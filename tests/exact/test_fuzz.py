"""A short run of the fuzzer, on the tiny model; `benchmarks/fuzz_exact.py` makes long ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.errors import LoadError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz_exact() -> Iterator[ModuleType]:
    path = ROOT / "benchmarks" / "fuzz_exact.py"
    spec = importlib.util.spec_from_file_location("fuzz_exact", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_exact"] = module  # dataclasses look their module up
    before = list(sys.path)  # the script puts its own folder in front
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def test_no_token_differs(fuzz_exact: ModuleType) -> None:
    target, tokenizer, source = fuzz_exact.tiny_target()
    fuzzer = fuzz_exact.Fuzzer(target, tokenizer, source, seed=11, max_tokens=48)
    result = fuzzer.run(8000)
    assert result.tokens >= 8000
    assert result.num_differing == 0
    # It would prove little if nothing were drafted, accepted, cached or cancelled.
    assert 0 < result.accepted < result.drafted
    assert result.cached_tokens > 0
    assert result.cancelled > 0


def test_no_token_of_drawn_models_differs_and_a_seed_plays_again(fuzz_exact: ModuleType) -> None:
    drawn = [fuzz_exact.play_world(5, index) for index in range(8)]
    assert all(result.num_differing == 0 for _, result in drawn)
    assert len({what["family"] for what, _ in drawn}) > 3
    assert len({what["drafter"] for what, _ in drawn}) > 1
    assert sum(result.tokens for _, result in drawn) > 2000
    assert sum(result.accepted for _, result in drawn) > 100
    assert fuzz_exact.play_world(5, 2) == drawn[2]


@pytest.mark.real_model
def test_no_token_of_the_default_model_differs(fuzz_exact: ModuleType) -> None:
    try:
        target, tokenizer, source = fuzz_exact.real_target("smollm2-135m", 0)
    except LoadError as error:
        pytest.skip(error.message)
    fuzzer = fuzz_exact.Fuzzer(target, tokenizer, source, seed=4, max_tokens=48)
    result = fuzzer.run(250)
    assert result.tokens >= 250
    assert result.num_differing == 0
