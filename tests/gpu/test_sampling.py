"""The device's sampler picks the very token that the definition in numpy picks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from slipstream.engine.sampling.reference import pick
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import F32, Picks
from tests.tiny import make_backend

pytestmark = pytest.mark.gpu

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.float32), None)
FILTERS = [
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 1, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 40, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
    {"top_k": 0, "top_p": 1e-6, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 0.999, "min_p": 1.0},
]


def draw(vocab: int, kind: str, random: np.random.Generator) -> F32:
    """Return a row of logits of some kind."""
    row = (4 * random.standard_normal(vocab)).astype(np.float32)
    if kind == "ties":
        return np.round(row).astype(np.float32)
    if kind == "zeros":
        return np.where(random.random(vocab) < 0.5, np.float32(0), np.float32(-0.0))
    if kind == "holes":
        row[random.integers(0, vocab, vocab // 2)] = -np.inf
        row[random.integers(0, vocab, 3)] = np.nan
    if kind == "all but one":
        row[:] = -np.inf
        row[vocab // 3] = 2
    if kind == "none":
        row[:] = np.nan if random.random() < 0.5 else -np.inf
    if kind == "infinite":
        row[5] = np.inf
    return row


@pytest.mark.parametrize("vocab", [97, 4096, 49_152, 262_144])
def test_every_pick_is_that_of_the_definition(vocab: int) -> None:
    make_backend("cuda")
    import torch

    from slipstream.kernels.cuda.sampling import DeviceSampler

    random = np.random.default_rng(vocab)
    kinds = ("plain", "ties", "zeros", "holes", "all but one", "none", "infinite")
    cases = list(product(kinds, FILTERS, (0.3, 1.0) if vocab < 10**5 else (0.9,)))
    rows = np.stack([draw(vocab, kind, random) for kind, _, _ in cases])
    count = len(cases)
    seeds = random.integers(0, 2**64, count, dtype=np.uint64)
    temperatures = np.array([t for _, _, t in cases], np.float32)
    temperatures[3] = 0  # a row that nobody samples
    picks = Picks(
        temperatures=temperatures,
        top_k=np.array([f["top_k"] for _, f, _ in cases], np.int32),
        top_p=np.array([f["top_p"] for _, f, _ in cases], np.float64),
        min_p=np.array([f["min_p"] for _, f, _ in cases], np.float64),
        seeds=seeds,
        choices=random.integers(0, 5, count).astype(np.uint32),
        positions=random.integers(0, 2**31, count).astype(np.uint32),
    )
    out = torch.full((count,), -7, dtype=torch.int32).pin_memory()
    sampler = DeviceSampler(torch.from_numpy(rows).cuda(), out, None)
    for _ in range(2):
        sampler.launch(picks)
        torch.cuda.synchronize()
        for i, (kind, filters, _) in enumerate(cases):
            if temperatures[i] == 0:
                assert out[i] == -7
                continue
            expected = pick(
                rows[i],
                *NOTHING,
                temperature=float(temperatures[i]),
                **filters,  # type: ignore[arg-type]
                key=NoiseKey(
                    seed=int(seeds[i]),
                    choice=int(picks.choices[i]),
                    position=int(picks.positions[i]),
                ),
            )
            assert out[i] == expected, (kind, filters)
