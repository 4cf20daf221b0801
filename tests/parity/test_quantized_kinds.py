"""Quantized matrices of every kind on the fast back end: products, embeddings, bytes, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.errors import LoadError
from slipstream.models.weights import DenseTensor, QuantizedTensor
from tests.quantized import FORMATS, KINDS, random_matrix
from tests.tiny import make_backend, make_rows

PATHS = ("cpu-avx512", "cpu-portable")
N, K = 37, 512  # a tile of five rows at the end, two units of two levels


def inputs(k: int) -> DenseTensor:
    values = np.random.default_rng(1).standard_normal((40, k), dtype=np.float32)
    return DenseTensor(values=values, dtype="f32")


def products(backend: Any, parts: list[Any], count: int = 19) -> np.ndarray[Any, Any]:
    """Multiply `count` rows of random inputs."""
    table, weight = backend.matrix([inputs(parts[0].shape[1])]), backend.matrix(parts)
    step = backend.compile(
        lambda ops: ops.logits(ops.embed(table), weight), max_rows=40, max_logits=40
    )
    return step(make_rows(range(count), range(count), [[0, 1, 2]])).logits.copy()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_agrees_with_the_reference(path: str, kind: str) -> None:
    matrix = random_matrix(N, K, **KINDS[kind])
    fast = products(make_backend(path), [matrix])
    slow = products(make_backend("reference", activation_groups=True), [matrix])
    assert slow.std() > 0.3
    # Sums of float32 in another order; a bias and what it offsets cancel but are rounded apart.
    assert np.abs(fast - slow).max() < 3e-5 * slow.std()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_row_is_dequantized_to_the_bit(path: str, kind: str) -> None:
    # A norm by rows of its own and unit matrices would round: take the row by single columns, where
    # all other products are with exact zeros.
    matrix, backend = random_matrix(N, K, **KINDS[kind]), make_backend(path)
    unit = np.eye(K, dtype=np.float32)
    table, one = backend.matrix([matrix]), backend.matrix([DenseTensor(values=unit, dtype="f32")])
    step = backend.compile(lambda ops: ops.logits(ops.embed(table), one), max_rows=N, max_logits=N)
    rows = step(make_rows(range(N), range(N), [[0, 1, 2]])).logits
    np.testing.assert_array_equal(rows, matrix.dequantize())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bytes_are_the_same_among_any_number_of_rows(path: str, kind: str) -> None:
    matrix = random_matrix(N, K, **KINDS[kind])
    expected = products(make_backend(path, kernel="gemv", threads=1), [matrix], 40)
    for threads in (1, 3):
        backend = make_backend(path, threads=threads)
        for count in (*range(1, 18), 33):
            np.testing.assert_array_equal(products(backend, [matrix], count), expected[:count])


@pytest.mark.parametrize("path", PATHS)
def test_kinds_side_by_side_in_one_weight_are_what_they_are_apart(path: str) -> None:
    # Files of the mixed K-quants keep v in six bits beside q and k in four.
    parts = [random_matrix(N, K, **FORMATS[name], seed=5) for name in ("Q4_K", "Q6_K", "Q8_0")]
    backend = make_backend(path, threads=2)
    together = products(backend, parts)
    apart = np.concatenate([products(backend, [part]) for part in parts], axis=1)
    np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_no_larger_than_a_tenth_above_the_files(kind: str) -> None:
    own = KINDS[kind]
    matrix, backend = random_matrix(64, 1024, **own), make_backend("cpu-portable")
    backend.matrix([matrix])
    if own["numbers"] in ("u8", "i8"):
        # A file packs the bytes of a second level below 64 into six bits.
        bits = {"u8": 6, "i8": 8}[own["numbers"]] / own["group"] + 16 / 256
    else:
        bits = {"f16": 16, "bf16": 16, "f32": 32}[own["numbers"]] / own["group"]
    stored = 64 * 1024 * (own["bits"] + bits * (2 if own["bias"] else 1)) / 8
    assert backend.weight_bytes() <= 1.05 * stored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3, "zero": 0}, "4, 5, 6 or 8 bits .* got 3 bits in groups of 32"),
        ({"group": 256}, "groups of 16, 32, 64 or 128, got 4 bits in groups of 256"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    matrix = random_matrix(16, 512, **(FORMATS["Q4_1"] | changes))
    with pytest.raises(LoadError, match=message):
        make_backend("cpu-auto").matrix([matrix])


def test_a_width_that_is_no_whole_blocks_is_refused_by_name() -> None:
    matrix = random_matrix(16, 48, **(FORMATS["Q4_1"] | {"group": 16}))
    with pytest.raises(LoadError, match="a multiple of 32 columns wide, got 48"):
        make_backend("cpu-auto").matrix([matrix])


def test_scales_and_biases_of_two_kinds_are_refused() -> None:
    own = random_matrix(16, 512, **FORMATS["Q4_1"])
    assert own.bias is not None
    mixed = QuantizedTensor(
        bits=4, codes=own.codes, zero=0, scale=own.scale, bias=own.dequantize()[:, :16]
    )
    with pytest.raises(LoadError, match="of one kind, got f16 and f32"):
        make_backend("cpu-auto").matrix([mixed])
