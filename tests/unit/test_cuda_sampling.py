"""What the device's sampler does in torch, on the CPU: the cut that top-k and top-p make."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the device's sampler is torch and CUDA C++")

import torch

from slipstream.engine.sampling.reference import kept, weigh
from slipstream.kernels.cuda import sampling
from tests.gpu.test_sampling import draw


@pytest.mark.parametrize("top_k", [0, 1, 7, 97, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6, 0.0])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "holes", "all but one"])
def test_tokens_up_to_the_cut_are_those_that_filters_keep(
    kind: str, top_p: float, top_k: int
) -> None:
    vocab = 97
    for seed in range(10):
        row = draw(vocab, kind, np.random.default_rng(seed))
        row = np.where(np.isnan(row), np.float32(-np.inf), row)
        weights = weigh((row - row.max()) / np.float32(0.8))
        value, token_id = sampling.last_kept(
            torch.from_numpy(row),
            torch.from_numpy(weights.astype(np.int64)) if top_p < 1 else None,
            top_k=top_k if 0 < top_k < vocab else vocab,
            top_p=top_p,
        )
        ids = np.arange(vocab)
        cut, cut_id = float(value), int(token_id)
        got = (row > -np.inf) & ((row > cut) | ((row == cut) & (ids <= cut_id)))
        expected = kept(row, weights, top_k=top_k, top_p=top_p, min_p=0.0)
        assert np.array_equal(got, expected), seed
