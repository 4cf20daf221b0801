"""Encodings: the canonical tensor stands for exactly the values that the format defines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slipstream.errors import LoadError
from slipstream.models.loading.finite import is_finite
from slipstream.models.loading.formats import FORMATS, find_format
from slipstream.models.weights import (
    BFloat16,
    DenseTensor,
    QuantizedTensor,
    TwoLevel,
    float16_numbers,
)

QUANTIZED = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
}
OF_32 = [type_id for type_id, name in QUANTIZED.items() if not name.endswith("_K")]
WITH_MINIMUM = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}
N, K = 48, 1280
# Zeros of both signs, the smallest and largest subnormal, the smallest and largest normal, ones.
EDGES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], "<u2")


def places_of_halves(type_id: int) -> tuple[int, ...]:
    """Where a block's float16 numbers lie, the scale first."""
    if QUANTIZED[type_id] == "Q6_K":
        return (208,)
    return (0, 2) if QUANTIZED[type_id] in WITH_MINIMUM else (0,)


def random_blocks(type_id: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random blocks of an (N, K) tensor; scales are any finite float16, the edges included."""
    generator = np.random.default_rng(seed)
    form = FORMATS[type_id]
    blocks = generator.integers(0, 256, (N * K // form.block, form.block_bytes), dtype=np.uint8)
    for index, at in enumerate(places_of_halves(type_id)):
        halves = generator.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] = 0x1234
        halves[: len(EDGES)] = np.roll(EDGES, index)
        blocks[:, at : at + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    # Blocks of all ones and all zeros: the largest codes and small scales, and none at all.
    body = np.setdiff1d(
        np.arange(form.block_bytes), [at + i for at in places_of_halves(type_id) for i in (0, 1)]
    )
    blocks[np.ix_([20, 22], body)] = 255
    blocks[np.ix_([21, 23], body)] = 0
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


@pytest.mark.parametrize("type_id", [2, 3, 8])
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


@pytest.mark.parametrize("type_id", [12, 13, 14])
def test_values_equal_the_k_quants_read_one_by_one(type_id: int) -> None:
    form = FORMATS[type_id]
    raw = random_blocks(type_id, 9)
    got = form.decode(raw, (N, K)).dequantize().reshape(-1, 256)
    for block, values in list(zip(raw.reshape(-1, form.block_bytes), got, strict=True))[::17]:
        read = read_q6_k if form.name == "Q6_K" else read_q4_k_or_q5_k
        np.testing.assert_array_equal(values.view(np.uint32), read(block).view(np.uint32))


@pytest.mark.parametrize("type_id", [12, 13, 14])
def test_chunks_are_invisible(type_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(type_id, 6)
    whole = FORMATS[type_id].decode(raw, (N, K))
    monkeypatch.setattr("slipstream.models.loading.k_quants._CHUNK", 7)
    cut = FORMATS[type_id].decode(raw, (N, K))
    assert isinstance(whole, QuantizedTensor)
    assert isinstance(cut, QuantizedTensor)
    np.testing.assert_array_equal(cut.codes, whole.codes)


def read_q4_k_or_q5_k(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Read an element at a time, as the format's words have it."""
    d, dmin = block[:4].view("<f2").astype(np.float32)
    packed = [int(byte) for byte in block[4:16]]
    fifth, nibbles = (block[16:48], block[48:]) if len(block) == 176 else (None, block[16:])
    values = np.empty(256, np.float32)
    for element in range(256):
        group, place = divmod(element, 32)
        if group < 4:
            small, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            small = packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4
            minimum = packed[group + 4] >> 4 | (packed[group] >> 6) << 4
        code = int(nibbles[group // 2 * 32 + place]) >> 4 * (group % 2) & 15
        if fifth is not None:
            code |= (int(fifth[place]) >> group & 1) << 4
        values[element] = d * np.float32(small) * np.float32(code) - dmin * np.float32(minimum)
    return values


def read_q6_k(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    small, d = block[192:208].view(np.int8), block[208:].view("<f2").astype(np.float32)[0]
    values = np.empty(256, np.float32)
    for element in range(256):
        half, rest = divmod(element, 128)
        run, place = divmod(rest, 32)
        code = int(block[half * 64 + run % 2 * 32 + place]) >> 4 * (run // 2) & 15
        code |= (int(block[128 + half * 32 + place]) >> 2 * run & 3) << 4
        values[element] = d * np.float32(small[element // 16]) * np.float32(code - 32)
    return values


@pytest.mark.parametrize(
    ("type_id", "bits", "zero", "group", "has_bias"),
    [
        (2, 4, 8, 32, False),
        (3, 4, 0, 32, True),
        (6, 5, 16, 32, False),
        (7, 5, 0, 32, True),
        (8, 8, 128, 32, False),
        (12, 4, 0, 32, True),
        (13, 5, 0, 32, True),
        (14, 6, 32, 16, False),
    ],
)
def test_canonical_fields_follow_the_contract(
    type_id: int, bits: int, zero: int, group: int, has_bias: bool
) -> None:
    tensor = FORMATS[type_id].decode(random_blocks(type_id, 1), (N, K))
    assert isinstance(tensor, QuantizedTensor)
    assert (tensor.bits, tensor.zero, tensor.shape, tensor.group) == (bits, zero, (N, K), group)
    assert tensor.codes.dtype == np.uint8
    assert tensor.codes.max() < 1 << bits
    assert tensor.codes.flags.c_contiguous
    assert (tensor.bias is not None) == has_bias
    for numbers in (tensor.scale, tensor.bias) if tensor.bias is not None else (tensor.scale,):
        assert numbers.shape == (N, K // group)
        if type_id in OF_32:
            halves = float16_numbers(numbers)
            assert halves is not None
            assert halves.dtype == np.float16
        else:
            assert isinstance(numbers, TwoLevel)
            assert numbers.super.shape == (N, K // 256)
            assert numbers.super.dtype == np.float16
            assert numbers.small.dtype == (np.int8 if group == 16 else np.uint8)
            assert group == 16 or numbers.small.max() < 64


@pytest.mark.parametrize("type_id", QUANTIZED)
def test_rows_are_those_of_the_whole(type_id: int) -> None:
    tensor = FORMATS[type_id].decode(random_blocks(type_id, 5), (N, K))
    part = tensor.rows(7, 20)
    assert part.shape == (13, K)
    np.testing.assert_array_equal(part.dequantize(), tensor.dequantize()[7:20])


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_other_scales_are_kept_exactly(kind: str) -> None:
    generator = np.random.default_rng(4)
    values = generator.normal(size=(2, 6, 3)).astype(np.float32)
    if kind == "bf16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        scale, bias = (BFloat16(bits=part) for part in bits)
    else:
        scale, bias = values
    codes = generator.integers(0, 256, (6, 192), dtype=np.uint8)
    tensor = QuantizedTensor(bits=8, codes=codes, zero=0, scale=scale, bias=bias)
    assert tensor.group == 64
    wide = [part.repeat(64, axis=1) for part in values]
    expected = codes.astype(np.float32) * wide[0] + wide[1]
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(tensor.rows(2, 5).dequantize(), expected[2:5])
    assert float16_numbers(tensor.scale) is None
    assert is_finite(tensor)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_a_scale_whose_product_overflows_is_seen(value: float) -> None:
    for place in range(2):
        numbers = [np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)]
        numbers[place][1, 0] = value
        bits = [BFloat16(bits=(part.view(np.uint32) >> 16).astype(np.uint16)) for part in numbers]
        codes = np.zeros((2, 64), np.uint8)
        for scale, bias in (numbers, bits):
            tensor = QuantizedTensor(bits=4, codes=codes, zero=0, scale=scale, bias=bias)
            assert not is_finite(tensor)


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


@pytest.mark.parametrize(("type_id", "name"), [(10, "Q2_K"), (23, "IQ4_XS"), (99, "unknown")])
def test_other_encodings_are_refused_by_name(type_id: int, name: str) -> None:
    readable = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"
    with pytest.raises(LoadError, match=f"{readable}, got {name}"):
        find_format(type_id)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
@pytest.mark.parametrize("type_id", QUANTIZED)
def test_an_infinite_or_nan_scale_is_seen(type_id: int, bits: int) -> None:
    for at in places_of_halves(type_id):
        raw = random_blocks(type_id, 2)
        assert is_finite(FORMATS[type_id].decode(raw, (N, K)))
        raw[at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        assert not is_finite(FORMATS[type_id].decode(raw, (N, K)))
