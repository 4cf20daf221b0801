"""Gemma 4's assistant on the GPU: the reference's drafts, and text that does not depend on it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the pair is made by transformers")

import numpy as np

from slipstream.kernels.reference import ReferenceBackend
from tests.exact.test_gemma_pair import (
    folder,
    test_a_pair_says_the_same_in_any_company,
    test_a_pair_says_what_its_target_says_alone,
)
from tests.gpu.test_draft_ops import watch
from tests.parity.test_gemma_assistant import ANCHORS, LENGTHS, K, Pair, drafted, pair
from tests.tiny import make_backend

__all__ = [
    "folder",
    "pair",
    "test_a_pair_says_the_same_in_any_company",
    "test_a_pair_says_what_its_target_says_alone",
]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_and_logits_are_near_the_references(
    pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = make_backend("cuda")
    seen = watch(monkeypatch)
    slow = ReferenceBackend(bfloat16_activations=True)
    options = {"temperature": temperature, "seeds": tuple(range(len(ANCHORS)))}
    ours, theirs = (np.array(drafted(pair.ours(back), **options)) for back in (fast, slow))
    logits = [
        np.stack([step.tensor[: len(LENGTHS)].cpu().numpy() for step in seen[0][:K]]),
        np.stack([step.numpy() for step in seen[1]]),
    ]
    same = np.cumprod(ours == theirs, axis=1)
    alike = np.column_stack([np.ones(len(LENGTHS)), same])[:, :K].astype(bool).T
    error, size = np.abs(logits[0] - logits[1])[alike], logits[1].std()
    print(f"mean {error.mean() / size:.2e}, max {error.max() / size:.2e}, same {same.mean():.2f}")
    # Scores are not scaled in this family: what bfloat16 rounds off grows in the softmax.
    assert error.mean() < 1.5e-2 * size
    assert error.max() < 2e-1 * size
    assert same[:, 0].sum() >= len(LENGTHS) - 1
    assert same.mean() > 0.6
