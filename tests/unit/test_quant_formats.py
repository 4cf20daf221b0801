"""Encodings: the canonical tensor stands for exactly the values that the format defines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slipstream.errors import LoadError
from slipstream.models.loading.formats import FORMATS, find_format
from slipstream.models.loading.weights_map import is_finite
from slipstream.models.weights import DenseTensor, QuantizedTensor

QUANTIZED = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
N, K = 48, 160
# Zeros of both signs, the smallest and largest subnormal, the smallest and largest normal, ones.
EDGES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], "<u2")


def random_blocks(type_id: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random blocks of an (N, K) tensor; scales are any finite float16, the edges included."""
    generator = np.random.default_rng(seed)
    form = FORMATS[type_id]
    blocks = generator.integers(0, 256, (N * K // form.block, form.block_bytes), dtype=np.uint8)
    for at in (0, 2) if QUANTIZED[type_id] == "Q4_1" else (0,):
        halves = generator.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] = 0x1234
        halves[: len(EDGES)] = np.roll(EDGES, at)
        blocks[:, at : at + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


@pytest.mark.parametrize("type_id", QUANTIZED)
@pytest.mark.parametrize("seed", range(4))
def test_values_equal_the_reference_bit_for_bit(type_id: int, seed: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType(type_id)
    raw = random_blocks(type_id, seed)
    expected = quants.dequantize(raw.reshape(N, -1), kind).astype(np.float32)
    got = FORMATS[type_id].decode(raw, (N, K)).dequantize()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_id", QUANTIZED)
def test_values_equal_the_blocks_read_one_by_one(type_id: int) -> None:
    form = FORMATS[type_id]
    raw = random_blocks(type_id, 9)
    got = form.decode(raw, (N, K)).dequantize().reshape(-1, 32)
    for block, values in list(zip(raw.reshape(-1, form.block_bytes), got, strict=True))[::7]:
        halves = block[:4].view("<f2").astype(np.float32)
        scale, bias = halves[0], halves[1] if form.name == "Q4_1" else np.float32(0)
        if form.name == "Q8_0":
            codes = block[2:].view(np.int8).astype(np.float32)
        else:
            packed = block[4:] if form.name == "Q4_1" else block[2:]
            codes = np.concatenate([packed & 15, packed >> 4]).astype(np.float32)
            codes -= 8 if form.name == "Q4_0" else 0
        np.testing.assert_array_equal(values, codes * scale + bias)


def test_low_nibbles_are_the_first_half_of_a_block() -> None:
    block = np.frombuffer(b"\x00\x3c" + bytes(range(16)), np.uint8)
    tensor = FORMATS[2].decode(block.copy(), (1, 32))
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.codes[0].tolist() == [*range(16), *[0] * 16]
    assert tensor.dequantize()[0].tolist() == [*range(-8, 8), *[-8.0] * 16]


@pytest.mark.parametrize(
    ("type_id", "bits", "zero", "has_bias"), [(2, 4, 8, False), (3, 4, 0, True), (8, 8, 128, False)]
)
def test_canonical_fields_follow_the_contract(
    type_id: int, bits: int, zero: int, has_bias: bool
) -> None:
    tensor = FORMATS[type_id].decode(random_blocks(type_id, 1), (N, K))
    assert isinstance(tensor, QuantizedTensor)
    assert (tensor.bits, tensor.zero, tensor.shape, tensor.group) == (bits, zero, (N, K), 32)
    assert tensor.codes.dtype == np.uint8
    assert tensor.codes.max() < 1 << bits
    assert tensor.codes.flags.c_contiguous
    assert tensor.scale.shape == (N, K // 32)
    assert tensor.scale.dtype == np.float16
    assert (tensor.bias is not None) == has_bias


@pytest.mark.parametrize(("type_id", "dtype"), [(0, "f32"), (1, "f16"), (30, "bf16")])
def test_dense_values_are_kept_as_stored(type_id: int, dtype: str) -> None:
    form = FORMATS[type_id]
    bits = np.random.default_rng(3).integers(0, 256, 6 * form.block_bytes, dtype=np.uint8)
    bits[form.block_bytes - 1 :: form.block_bytes] = 0x42  # the exponent of an ordinary number
    tensor = form.decode(bits.copy(), (2, 3))
    assert isinstance(tensor, DenseTensor)
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3))
    assert tensor.values.tobytes() == bits.tobytes()
    if dtype == "bf16":
        widened = np.zeros((6, 4), np.uint8)
        widened[:, 2:] = bits.reshape(6, 2)
        assert tensor.dequantize().tobytes() == widened.tobytes()


@pytest.mark.parametrize("type_id", FORMATS)
def test_sizes_follow_the_blocks(type_id: int) -> None:
    form = FORMATS[type_id]
    assert form.num_bytes(form.block * 10) == 10 * form.block_bytes
    assert form.is_quantized == (type_id in QUANTIZED)


@pytest.mark.parametrize(("type_id", "name"), [(14, "Q6_K"), (6, "Q5_0"), (99, "unknown")])
def test_other_encodings_are_refused_by_name(type_id: int, name: str) -> None:
    with pytest.raises(LoadError, match=f"F32, F16, BF16, Q4_0, Q4_1, Q8_0, got {name}"):
        find_format(type_id)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_an_infinite_or_nan_scale_is_seen(bits: int) -> None:
    for type_id in QUANTIZED:
        raw = random_blocks(type_id, 2)
        assert is_finite(FORMATS[type_id].decode(raw, (N, K)))
        raw[:2] = np.array([bits], "<u2").view(np.uint8)
        assert not is_finite(FORMATS[type_id].decode(raw, (N, K)))
