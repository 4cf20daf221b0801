"""The CPU kernels against the reference, which rounds activations the same way, over odd shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.errors import LoadError
from tests.tiny import (
    ARCH,
    KINDS,
    TinyModel,
    make_backend,
    make_rows,
    quantize,
    tiny_arch,
    tiny_model,
    tiny_tensors,
)

PATHS = ("cpu-avx512", "cpu-portable")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ragged tiles": {"vocab_size": 131, "ffn_size": 160},
    "one head a group": {"num_kv_heads": 4},
    "three heads a group": {"num_heads": 9, "num_kv_heads": 3},
    "one kv head": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 32},
    "wide heads": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 80},
    "half-split rope": {"rope_interleaved": False},
    "untied": {"tied_embedding": False},
    "three layers": {"num_layers": 3, "hidden_size": 96},
}


def logits_over(model: TinyModel, context: int) -> np.ndarray[Any, Any]:
    """Prefill a random prompt in chunks and return the logits of its last eight positions."""
    ids = np.random.default_rng(5).integers(0, model.arch.vocab_size, context)
    pages = [list(range(model.kv.num_pages))[::-1]]
    for start in range(0, context - 8, 50):
        end = min(start + 50, context - 8)
        model.step(make_rows(ids[start:end], range(start, end), pages, logit_rows=[]))
    return model.step(make_rows(ids[-8:], range(context - 8, context), pages)).logits.copy()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_logits_agree_with_the_reference(path: str, shape: str) -> None:
    # No activation is rounded: KV pages hold fp16 and everything else is float32, so what is left
    # is the order of sums, and now and then a KV value that rounds to the neighbouring fp16.
    tensors = tiny_tensors(tiny_arch(**SHAPES[shape]), kind="f32")
    fast = logits_over(tiny_model(make_backend(path), tensors), 200)
    slow = logits_over(tiny_model(make_backend("reference"), tensors), 200)
    error = np.abs(fast - slow)
    assert error.mean() < 5e-4 * slow.std()
    assert error.max() < 5e-3 * slow.std()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_the_reference_in_every_weight_kind(path: str, kind: str) -> None:
    # A float32 sum in another order tips an activation to the next of 255 steps; that change tips
    # others in later layers, so whole quantized models agree to the size of that rounding only.
    # Single products, below, agree tightly.
    tensors = tiny_tensors(kind=kind)
    fast = logits_over(tiny_model(make_backend(path), tensors), 90)
    slow = logits_over(tiny_model(make_backend("reference", activation_groups=True), tensors), 90)
    assert np.abs(fast - slow).mean() < 2e-2 * slow.std()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(97, 64), (16, 32), (1, 96), (33, 1536), (192, 576)])
def test_a_product_agrees_with_the_reference(path: str, kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    random = np.random.default_rng(n)
    table = quantize(random.standard_normal((40, k), dtype=np.float32), "f32")
    matrix = quantize(random.standard_normal((n, k), dtype=np.float32), kind)

    def run(backend: Any) -> np.ndarray[Any, Any]:
        rows, weight = backend.matrix([table]), backend.matrix([matrix])
        step = backend.compile(
            lambda ops: ops.logits(ops.embed(rows), weight), max_rows=19, max_logits=19
        )
        return step(make_rows(range(19), range(19), [[0, 1]])).logits.copy()

    fast, slow = run(make_backend(path)), run(make_backend("reference", activation_groups=True))
    assert fast.shape == (19, n)
    assert np.abs(fast - slow).max() < 2e-5 * k**0.5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_dequantized_weights(path: str, kind: str) -> None:
    # Without layers, the logits are the normed embedding times itself; its largest row is itself
    # only if every element arrived, so compare against the same arithmetic in numpy.
    tensors, backend = tiny_tensors(kind=kind), make_backend(path)
    embedding, norm = backend.matrix([tensors.embedding]), backend.vector(tensors.norm)
    step = backend.compile(
        lambda ops: ops.logits(ops.rms_norm(ops.embed(embedding), norm, 1.0), embedding),
        max_rows=16,
        max_logits=16,
    )
    table = tensors.embedding.dequantize().astype(np.float64)
    logits = step(make_rows(range(16), range(16), [[0]])).logits
    x = table[:16]
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1.0) * tensors.norm.dequantize()
    expected = normed @ table.T
    tolerance = 1e-5 if kind in ("f32", "f16", "bf16") else 2e-2  # int8 activations
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


def test_kinds_of_one_fused_matrix_may_differ() -> None:
    # Files keep, say, v in eight bits beside q and k in four.
    reference, fast = make_backend("reference", activation_groups=True), make_backend("cpu-auto")
    four, eight = tiny_tensors(kind="q4_1"), tiny_tensors(kind="q8_0")
    mixed = [four.layers[0].q, eight.layers[0].v, four.layers[0].gate]
    x = [3, 1, 4, 1, 5]

    def run(backend: Any) -> np.ndarray[Any, Any]:
        table, fused = backend.matrix([four.embedding]), backend.matrix(mixed)
        step = backend.compile(
            lambda ops: ops.logits(ops.embed(table), fused), max_rows=8, max_logits=8
        )
        return step(make_rows(x, range(5), [[0]])).logits.copy()

    fast_out, slow_out = run(fast), run(reference)
    assert fast_out.shape == (5, 64 + 32 + 96)
    assert np.abs(fast_out - slow_out).max() < 1e-4 * slow_out.std()


def test_a_head_size_that_no_vector_divides_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match="multiples of 16 up to 512, got 24"):
        make_backend("cpu-auto").kv_cache(tiny_arch(head_dim=24), 4, 64)


def test_a_step_of_too_many_rows_is_refused_before_it_runs() -> None:
    model = tiny_model(make_backend("cpu-auto"), tiny_tensors(), max_rows=4)
    with pytest.raises(ValueError, match="1 to 4 rows"):
        model.step(make_rows(range(5), range(5), [[0]]))
    assert model.arch == ARCH
