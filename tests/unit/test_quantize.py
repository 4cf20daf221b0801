"""Rounding at load: the error is bounded, chunks do not show, tables keep eight bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slipstream.errors import LoadError
from slipstream.models.loading import quantize as module
from slipstream.models.loading.assistant_tensors import quantize as by_range
from slipstream.models.loading.quantize import quantize
from slipstream.models.loading.weights_map import load_decoder
from slipstream.models.weights import DenseTensor, QuantizedTensor
from tests.families import MemorySource, family_arch, random_checkpoint, random_weights
from tests.tiny import make_backend


def dense(seed: int = 0, shape: tuple[int, int] = (40, 96)) -> DenseTensor:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    values[3] = 0.25  # groups of one value
    values[4] = 0
    values[5, :32] *= 1e-6
    return DenseTensor(values=values, dtype="f32")


def squares(tensor: QuantizedTensor, exact: DenseTensor) -> np.ndarray:
    rest = tensor.dequantize() - exact.values
    return (rest * rest).reshape(len(rest), -1, 32).sum(axis=2)


def test_four_bits_are_never_worse_than_the_range_of_a_group() -> None:
    tensor = dense()
    got, plain = squares(quantize(tensor, 4), tensor), squares(by_range(tensor.values, 4), tensor)
    assert (got <= plain + 1e-6).all()
    assert got.sum() < 0.93 * plain.sum()


def test_eight_bits_are_within_half_a_step() -> None:
    tensor = dense()
    quantized = quantize(tensor, 8)
    assert isinstance(quantized.scale, np.ndarray)
    scale = quantized.scale
    off = np.abs(quantized.dequantize() - tensor.values).reshape(len(scale), -1, 32).max(axis=2)
    # The scale itself is rounded to float16, which the largest code feels 127 times.
    bound = scale.astype(np.float32) / 2 + 127 * np.spacing(scale).astype(np.float32) / 2
    assert (off <= bound * np.float32(1.001)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_do_not_depend_on_their_chunk(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = dense()
    whole = quantize(tensor, bits)
    monkeypatch.setattr(module, "_CHUNK", 1)
    for field in dataclasses.fields(whole):
        one, other = getattr(whole, field.name), getattr(quantize(tensor, bits), field.name)
        assert np.array_equal(one, other)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_files_precision_makes_no_difference_to_equal_values(bits: int) -> None:
    halves = dense().values.astype(np.float16)
    from_f16 = quantize(DenseTensor(values=halves, dtype="f16"), bits)
    from_f32 = quantize(DenseTensor(values=halves.astype(np.float32), dtype="f32"), bits)
    assert np.array_equal(from_f16.codes, from_f32.codes)


@pytest.mark.parametrize(("kind", "bits"), [("q4", 4), ("q8", 8)])
def test_matrices_are_rounded_and_vectors_are_not(kind: str, bits: int) -> None:
    checkpoint = dataclasses.replace(random_checkpoint(family_arch("qwen2")), quantize=kind)
    with checkpoint.open() as read:
        matrix, table = read("layers.0.gate"), read("embedding")
        assert isinstance(matrix, QuantizedTensor)
        assert isinstance(table, QuantizedTensor)
        assert (matrix.bits, table.bits) == (bits, 8)
        for role in ("norm", "layers.0.q_bias"):
            assert isinstance(read(role), DenseTensor)


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize(
    ("value", "part"),
    [(float("nan"), "holds an infinity or NaN"), (float("inf"), "holds an"), (3e38, "cannot hold")],
)
@pytest.mark.parametrize("role", ["embedding", "layers.1.gate"])
def test_values_beyond_what_they_are_rounded_to_are_named(
    kind: str, value: float, part: str, role: str
) -> None:
    arch = family_arch("qwen2")
    weights = random_weights(arch)
    weights[role][2, 5] = value
    tensors = {name: DenseTensor(values=w, dtype="f32") for name, w in weights.items()}
    checkpoint = dataclasses.replace(
        random_checkpoint(arch), source=MemorySource(tensors), quantize=kind
    )
    with pytest.raises(LoadError, match=f"{role} .*{part}"):
        load_decoder(checkpoint, make_backend("reference"))


def test_what_is_quantized_or_has_no_whole_groups_stays() -> None:
    four = random_checkpoint(family_arch("qwen2"), kind="q4_0")
    with four.open() as read, dataclasses.replace(four, quantize="q8").open() as read_again:
        assert read_again("layers.0.gate") is read("layers.0.gate")
    odd = dense(shape=(8, 80))
    assert module.quantized(odd, "q4", is_table=False) is odd
