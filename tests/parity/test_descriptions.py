"""Every feature of a description on the fast back end, against the reference by op bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.models.arch import Arch
from tests.described_drafts import CASES, MAX_K, described_drafting, drafts_after
from tests.descriptions import ARCHS, described_model, random_description
from tests.exact.test_draft_ops_invariance import PROMPTS
from tests.tiny import TinyModel, make_backend, make_rows

PATHS = ("cpu-avx512", "cpu-portable")
CONTEXT = 170  # beyond every window, in a third split


def logits_over(model: TinyModel) -> np.ndarray[Any, Any]:
    """Prefill a random prompt in chunks and return the logits of its last eight positions."""
    ids = np.random.default_rng(5).integers(0, model.arch.vocab_size, CONTEXT)
    pages = [list(range(model.kv.num_pages))[::-1]]
    for start in range(0, CONTEXT - 8, 50):
        end = min(start + 50, CONTEXT - 8)
        model.step(make_rows(ids[start:end], range(start, end), pages, logit_rows=[]))
    return model.step(make_rows(ids[-8:], range(CONTEXT - 8, CONTEXT), pages)).logits.copy()


def check(path: str, arch: Arch) -> None:
    # Dense float32: what is left is the order of sums, and now and then a K or V that rounds to the
    # neighbouring fp16.
    fast = logits_over(described_model(make_backend(path), arch))
    slow = logits_over(described_model(make_backend("reference"), arch))
    error = np.abs(fast - slow)
    assert slow.std() > 0.05
    assert error.mean() < 5e-4 * slow.std()
    assert error.max() < 5e-3 * slow.std()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ARCHS)
def test_a_feature_agrees_with_the_reference(path: str, name: str) -> None:
    check(path, ARCHS[name])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(16))
def test_random_descriptions_agree_with_the_reference(path: str, seed: int) -> None:
    check(path, random_description(seed))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_drafts_agree_with_the_reference(path: str, case: str) -> None:
    # Dense float32: only a near tie of logits could fall the other way.
    arch, options = CASES[case]
    orders = [[0], [1, 4], [0, 1, 2, 3, 4]]

    def drafts(name: str, **settings: Any) -> list[dict[int, list[int]]]:
        backend = make_backend(name, **settings)
        model = described_drafting(backend, arch, kind="f32", **options)
        return [drafts_after(model, PROMPTS, order, MAX_K) for order in orders]

    assert drafts(path, threads=2) == drafts("reference")
