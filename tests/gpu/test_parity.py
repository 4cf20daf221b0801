"""The CUDA back end against the reference: single products, whole tiny models, long contexts.

Products take bfloat16 inputs, eight bits of mantissa, and so does the reference here. What is left
is the order of float32 sums, queries and attention weights in fp16, and what follows from them: a
value near the middle between two bfloat16 falls to the other side, and later layers carry that on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity.test_cpu_kernels import SHAPES, logits_over
from tests.tiny import (
    KINDS,
    TinyModel,
    TinyTensors,
    make_backend,
    make_rows,
    quantize,
    tiny_arch,
    tiny_model,
    tiny_tensors,
)

pytestmark = pytest.mark.gpu

F32 = np.ndarray[Any, np.dtype[np.float32]]
WIDER: dict[str, dict[str, Any]] = {
    **SHAPES,
    "128 wide": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    "256 wide": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256},
    "twenty heads a group": {"num_heads": 20, "num_kv_heads": 1},
}


def rounded(values: F32) -> F32:
    """Return values rounded to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    out: F32 = bits.view(np.float32)
    return out


def reference_model(tensors: TinyTensors, **limits: int) -> TinyModel:
    """Return a model on the reference, its products' inputs rounded to bfloat16."""
    return tiny_model(make_backend("reference", bfloat16_activations=True), tensors, **limits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(97, 64), (16, 32), (4, 96), (36, 1536), (192, 576)])
def test_a_product_agrees_with_float64(kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    random = np.random.default_rng(n)
    inputs = random.standard_normal((40, k), dtype=np.float32)
    matrix = quantize(random.standard_normal((n, k), dtype=np.float32), kind)
    backend = make_backend("cuda")
    rows, weight = backend.matrix([quantize(inputs, "f32")]), backend.matrix([matrix])
    step = backend.compile(
        lambda ops: ops.logits(ops.embed(rows), weight), max_rows=19, max_logits=19
    )
    fast = step(make_rows(range(19), range(19), [[0, 1]])).logits
    exact = rounded(inputs[:19]).astype(np.float64) @ matrix.dequantize().astype(np.float64).T
    assert np.abs(fast - exact).max() < 4e-6 * k


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_dequantized_weights(kind: str) -> None:
    # The product with a unit matrix returns what was looked up, rounded to bfloat16.
    table = tiny_tensors(kind=kind).embedding
    backend = make_backend("cuda")
    unit = quantize(np.eye(table.shape[1], dtype=np.float32), "f32")
    rows, weight = backend.matrix([table]), backend.matrix([unit])
    step = backend.compile(
        lambda ops: ops.logits(ops.embed(rows), weight), max_rows=97, max_logits=97
    )
    looked_up = step(make_rows(range(97), range(97), [[0] * 7])).logits
    assert np.array_equal(looked_up, rounded(table.dequantize()))


@pytest.mark.parametrize("width", [32, 96, 3840, 16384])
def test_a_norm_agrees_with_float64(width: int) -> None:
    random = np.random.default_rng(width)
    inputs = 30 * random.standard_normal((24, width), dtype=np.float32)
    scale = quantize(random.uniform(0.5, 1.5, (1, width)).astype(np.float32), "f32")
    backend = make_backend("cuda")
    rows = backend.matrix([quantize(inputs, "f32")])
    vector = backend.vector(type(scale)(values=scale.values[0], dtype="f32"))  # type: ignore[call-arg, union-attr]
    first = np.zeros((32, width), np.float32)
    first[:, :32] = np.eye(32)
    weight = backend.matrix([quantize(first, "f32")])
    step = backend.compile(
        lambda ops: ops.logits(ops.rms_norm(ops.embed(rows), vector, 1e-5), weight),
        max_rows=24,
        max_logits=24,
    )
    normed = step(make_rows(range(24), range(24), [[0, 1]])).logits
    exact = inputs.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * scale.dequantize()
    assert np.abs(normed - exact[:, :32]).max() < 2**-8 * np.abs(exact).max()


@pytest.mark.parametrize("shape", WIDER)
def test_logits_agree_with_the_reference(shape: str) -> None:
    tensors = tiny_tensors(tiny_arch(**WIDER[shape]), kind="f32")
    fast = logits_over(tiny_model(make_backend("cuda"), tensors), 200)
    slow = logits_over(reference_model(tensors), 200)
    error = np.abs(fast - slow)
    print(f"{shape}: mean {error.mean() / slow.std():.2e}, max {error.max() / slow.std():.2e}")
    assert error.mean() < 1e-2 * slow.std()
    assert error.max() < 8e-2 * slow.std()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_the_reference_in_every_weight_kind(kind: str) -> None:
    tensors = tiny_tensors(kind=kind)
    fast = logits_over(tiny_model(make_backend("cuda"), tensors), 90)
    slow = logits_over(reference_model(tensors), 90)
    assert np.abs(fast - slow).mean() < 1e-2 * slow.std()


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_long_contexts_agree_with_the_reference(head_dim: int) -> None:
    arch = tiny_arch(context_len=1024, head_dim=head_dim)
    tensors = tiny_tensors(arch, kind="f32")
    fast = logits_over(tiny_model(make_backend("cuda"), tensors, num_pages=64), 900)
    slow = logits_over(reference_model(tensors, num_pages=64), 900)
    assert np.abs(fast - slow).mean() < 1e-2 * slow.std()


def test_pages_hold_what_the_reference_holds() -> None:
    tensors = tiny_tensors(kind="f32")
    models = [tiny_model(make_backend("cuda"), tensors), reference_model(tensors)]
    for model in models:
        logits_over(model, 90)
    for layer in range(models[0].arch.num_layers):
        for page in range(models[0].kv.num_pages):
            pairs = zip(*(model.kv.read(layer, page) for model in models), strict=True)
            for fast, slow in pairs:
                assert fast.shape == slow.shape
                assert np.abs(fast - slow).max() < 3e-2


def test_pages_are_zero_before_a_sequence_takes_them() -> None:
    model = tiny_model(make_backend("cuda"), tiny_tensors())
    logits_over(model, 90)
    written = list(range(model.kv.num_pages - 6, model.kv.num_pages))
    model.kv.zero([written[5], written[0], written[1]])
    for layer in range(model.arch.num_layers):
        for page in written:
            is_zero = not any(part.any() for part in model.kv.read(layer, page))
            assert is_zero == (page in (written[5], written[0], written[1]))


def test_equal_logits_take_the_lowest_id_and_nan_counts_as_numpy_counts_it() -> None:
    backend = make_backend("cuda")
    values = np.zeros((4, 32), np.float32)
    values[:, 0] = 1
    table = np.zeros((6000, 32), np.float32)
    table[[70, 4500, 5999], 0] = 7
    rows = backend.matrix([quantize(values, "f32")])
    weight = backend.matrix([quantize(table, "f32")])
    step = backend.compile(
        lambda ops: ops.logits(ops.embed(rows), weight), max_rows=4, max_logits=4
    )
    result = step(make_rows(range(4), range(4), [[0]]))
    assert result.argmax.tolist() == [70] * 4
    assert result.logits.argmax(axis=1).tolist() == [70] * 4
