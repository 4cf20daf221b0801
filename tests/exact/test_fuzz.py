"""A short run of the fuzzer, on the tiny model; `benchmarks/fuzz_exact.py` makes long ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz_exact() -> ModuleType:
    path = ROOT / "benchmarks" / "fuzz_exact.py"
    spec = importlib.util.spec_from_file_location("fuzz_exact", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_exact"] = module  # dataclasses look their module up
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


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
