"""Speculation is invisible in every kind of weights: GGUF's blocks, K-quants, MLX's groups."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.engine.engine import Engine
from slipstream.engine.target import build_target
from slipstream.models.weights import Tensor
from slipstream.types import SamplingParams
from tests.fake_model import FakeTokenizer, Scripted, always_wrong
from tests.quantized import KINDS, random_matrix
from tests.tiny import TinyLayer, TinyTensors, make_backend, tiny_arch, tiny_tensors, tiny_weights

# Whole blocks of 256 columns, as K-quants have them.
ARCH = tiny_arch(hidden_size=256, ffn_size=256, head_dim=64, context_len=128, tied_embedding=False)
PROMPT = [*range(20, 36), 3, 9, 27, 81, 50, 53, 62, 89, 73, 25, 75, 31, 93, *range(20, 36)]
COUNT = 30
# Q4_K_M and Q5_K_M keep some matrices in more bits than others, MLX likewise by layer.
MIXED = {
    "Q4_K beside Q6_K": ("Q4_K", "Q6_K"),
    "MLX 4 beside 8 bits": (
        "MLX 4 bits, groups of 64, bf16",
        "MLX 8 bits, groups of 64, bf16",
    ),
}


@pytest.fixture(params=["cpu-avx512", "cpu-portable"])
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def tensors_of(kind: str) -> TinyTensors:
    """Return the tiny model with matrices of a kind; of two kinds where it is mixed."""
    usual, other = MIXED.get(kind, (kind, kind))
    plain = tiny_tensors(ARCH, kind="f32")
    seeds = iter(range(100))

    def alike(tensor: Tensor, of: str = usual, gain: float = 1.0) -> Tensor:
        n, k = tensor.shape
        return random_matrix(n, k, **KINDS[of], seed=next(seeds), gain=gain)

    def layer(own: TinyLayer) -> TinyLayer:
        changes: dict[str, Any] = {"v": alike(own.v, other), "down": alike(own.down, other)}
        changes |= {name: alike(getattr(own, name), gain=2.0) for name in ("q", "k")}
        changes |= {name: alike(getattr(own, name)) for name in ("attn_out", "gate", "up")}
        return dataclasses.replace(own, **changes)

    return dataclasses.replace(
        plain,
        embedding=alike(plain.embedding, gain=16.0),  # rows of ordinary size: tokens differ
        output=alike(plain.output, gain=3.0),
        layers=tuple(layer(own) for own in plain.layers),
    )


def said(
    backend_name: str,
    kind: str,
    temperature: float,
    drafter: Callable[[], Drafter] | None = None,
    **settings: Any,
) -> list[int]:
    config = EngineConfig(**settings)
    target = build_target(
        ARCH,
        make_backend(backend_name),
        lambda backend: tiny_weights(backend, tensors_of(kind)),
        config,
    )
    makers = [drafter] if drafter else ()
    engine = Engine(target, FakeTokenizer(), config=config, make_drafters=makers)
    params = SamplingParams(
        max_tokens=COUNT, ignore_eos=True, temperature=temperature, seed=5 if temperature else None
    )
    (reply,) = engine.generate([PROMPT], params)
    return reply.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [*KINDS, *MIXED])
def test_text_does_not_depend_on_drafts(backend_name: str, kind: str, temperature: float) -> None:
    expected = said(backend_name, kind, temperature)
    assert temperature == 0 or len(set(expected)) > 5  # greedy text may go round
    known, draw = PROMPT + expected, random.Random(3)
    uneven = partial(Scripted, known, lambda _round, _place: draw.random() < 0.3)
    for drafter, k, chunk in ((uneven, 4, 7), (partial(Scripted, known), 15, 64)):
        assert said(backend_name, kind, temperature, drafter, k=k, prefill_chunk=chunk) == expected
    wrong = partial(Scripted, known, always_wrong)
    assert said(backend_name, kind, temperature, wrong, k=2, verify_pad="8") == expected


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_models_are_mixed(kind: str) -> None:
    layer = tensors_of(kind).layers[0]
    found = {np.unique(getattr(part, "codes", 0)).max() for part in (layer.q, layer.v)}
    assert len(found) == 2
