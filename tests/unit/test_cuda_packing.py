"""The layout of packed matrices holds every element where mma.m16n8k16 wants it, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="packing is done by torch")

from slipstream.errors import LoadError  # noqa: E402
from slipstream.kernels.cuda.layout import CHUNK, TILE, Layout, cut_columns, layout_of  # noqa: E402
from slipstream.kernels.cuda.packing import pack_parts  # noqa: E402
from slipstream.models.weights import (  # noqa: E402
    BFloat16,
    DenseTensor,
    GroupNumbers,
    QuantizedTensor,
    Tensor,
    TwoLevel,
)

CODES = [  # bits, zero, has bias, group
    (4, 0, True, 16),
    (4, 0, True, 32),
    (4, 0, True, 64),
    (4, 0, True, 128),
    (4, 8, False, 32),
    (8, 128, False, 32),
    (8, 0, True, 64),
    (8, 128, False, 16),
    (5, 16, False, 32),
    (5, 0, True, 32),
    (6, 0, True, 64),
    (6, 32, False, 16),
]
TWO_LEVELS = [(4, 0, True, 32), (5, 0, True, 32), (6, 32, False, 16)]


def draw_codes(n: int, k: int, bits: int, zero: int, has_bias: bool, group: int) -> QuantizedTensor:
    """Return a matrix of random codes, scales and biases."""
    random = np.random.default_rng(n * k + bits)
    halves = random.standard_normal((2, n, k // group)).astype(np.float16)
    return QuantizedTensor(
        bits=bits,
        codes=random.integers(0, 2**bits, (n, k), dtype=np.uint8),
        zero=zero,
        scale=halves[0],
        bias=halves[1] if has_bias else None,
    )


def draw_two_levels(n: int, k: int, bits: int, zero: int, has_bias: bool, group: int) -> Tensor:
    """Return a matrix whose scales and biases are of two levels, as the K-quants have them."""
    random = np.random.default_rng(n * k + bits)

    def numbers() -> TwoLevel:
        supers = random.standard_normal((n, k // 256)).astype(np.float16)
        shape = (n, k // group)
        if has_bias:
            return TwoLevel(super=supers, small=random.integers(0, 64, shape, dtype=np.uint8))
        return TwoLevel(super=supers, small=random.integers(-128, 128, shape, dtype=np.int8))

    return QuantizedTensor(
        bits=bits,
        codes=random.integers(0, 2**bits, (n, k), dtype=np.uint8),
        zero=zero,
        scale=numbers(),
        bias=numbers() if has_bias else None,
    )


def in_bfloat16(part: QuantizedTensor) -> QuantizedTensor:
    """Return a matrix whose scales and biases are the same bits, read as bfloat16."""

    def read(numbers: GroupNumbers) -> BFloat16:
        assert isinstance(numbers, np.ndarray)
        # Random float16 bits are finite as bfloat16: their sign and exponent are never all ones.
        return BFloat16(bits=numbers.view(np.uint16))

    return QuantizedTensor(
        bits=part.bits,
        codes=part.codes,
        zero=part.zero,
        scale=read(part.scale),
        bias=None if part.bias is None else read(part.bias),
    )


def draw_dense(n: int, k: int, dtype: str) -> DenseTensor:
    """Return a matrix of random values."""
    values = np.random.default_rng(n * k).standard_normal((n, k), dtype=np.float32)
    if dtype == "bf16":
        return DenseTensor(values=(values.view(np.uint32) >> 16).astype(np.uint16), dtype=dtype)
    return DenseTensor(values=values.astype(np.float16 if dtype == "f16" else "f4"), dtype=dtype)


def unpack(packed: np.ndarray, layout: Layout) -> np.ndarray:
    """Return float32 of shape (n, k), read as the kernels read it, from the mma's definition."""
    out = np.zeros((layout.tiles * TILE, layout.num_chunks * CHUNK), np.float32)
    shape = (layout.tiles, layout.splits, -1, layout.warps, layout.piece_bytes)
    pieces = packed.reshape(shape).swapaxes(2, 3).reshape(layout.tiles, -1, layout.piece_bytes)
    codes_size = layout.piece_chunks * layout.code_bytes
    shape = (layout.tiles, layout.num_chunks, -1)
    codes = np.ascontiguousarray(pieces[:, :, :codes_size]).reshape(shape)
    scales = np.ascontiguousarray(pieces[:, :, codes_size:]).reshape(shape)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for step in range(4):
            for register in range(4):
                row = g + 8 * (register % 2)
                for odd in range(2):
                    if layout.group == 16:
                        column = 16 * step + 4 * t + 2 * (register // 2) + odd
                    else:
                        column = 32 * (step // 2) + 8 * t + 4 * (step % 2)
                        column += 2 * (register // 2) + odd
                    value = _element(codes, layout, lane, step, register, odd)
                    if layout.quantized:
                        group = column // layout.group
                        value = _dequantize(value, scales, layout, group, g, register % 2)
                    tiles = out.reshape(layout.tiles, TILE, layout.num_chunks, CHUNK)
                    tiles[:, row, :, column] = value
    return out[: layout.n, : layout.k]


def _element(
    codes: np.ndarray, layout: Layout, lane: int, step: int, register: int, odd: int
) -> np.ndarray:
    """Return one element of register `register` of A for every tile and chunk, as float32."""
    if layout.kind == 4:
        words = codes.view(np.uint32).reshape(*codes.shape[:2], 32, 4)
        nibble = 2 * (register % 2) + register // 2 + 4 * odd
        return (words[:, :, lane, step] >> (4 * nibble) & 15).astype(np.float32)
    if layout.kind in (5, 6):
        bits = layout.kind - 4
        words = np.ascontiguousarray(codes[:, :, :512]).view(np.uint32)
        nibble = 2 * (register % 2) + register // 2 + 4 * odd
        low = words.reshape(*codes.shape[:2], 32, 4)[:, :, lane, step] >> (4 * nibble) & 15
        fields = np.ascontiguousarray(codes[:, :, 512:]).view(np.uint32)
        fields = fields.reshape(*codes.shape[:2], 32, bits)
        of_lane = fields[:, :, lane, step * bits // 4]
        place = 16 * odd + (4 * step + register) * bits % 16
        return (low + 16 * (of_lane >> place & (2**bits - 1))).astype(np.float32)
    if layout.kind == 8:
        words = codes.view(np.uint32).reshape(*codes.shape[:2], 2, 32, 2, 2)
        word = words[:, :, step // 2, lane, step % 2, register // 2]
        return (word >> (8 * (register % 2 + 2 * odd)) & 255).astype(np.float32)
    if layout.kind == 32:
        values = codes.view(np.float32).reshape(*codes.shape[:2], 4, 2, 32, 2, 2)
        return values[:, :, step, register // 2, lane, register % 2, odd]
    halves = codes.view(np.uint16).reshape(*codes.shape[:2], 4, 32, 4, 2)
    picked = halves[:, :, step, lane, register, odd]
    if layout.kind == 17:
        return picked.view(np.float16).astype(np.float32)
    return (picked.astype(np.uint32) << 16).view(np.float32)


def _dequantize(
    codes: np.ndarray, scales: np.ndarray, layout: Layout, group: int, g: int, lower: int
) -> np.ndarray:
    """Return scale * (code - zero) + bias of one group and output."""
    if layout.scale == 2:
        return _dequantize_two_levels(codes, scales, layout, group, g, lower)
    if layout.scale == 16:
        halves = (scales.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        halves = scales.copy().view(np.float16).astype(np.float32)
    shape = (*scales.shape[:2], CHUNK // layout.group, 8, 2, 2 if layout.has_bias else 1)
    pairs = halves.reshape(shape)[:, :, group, g, lower]
    values = (codes - np.float32(layout.zero)) * pairs[:, :, 0]
    return values + pairs[:, :, 1] if layout.has_bias else values


def _dequantize_two_levels(
    codes: np.ndarray, scales: np.ndarray, layout: Layout, group: int, g: int, lower: int
) -> np.ndarray:
    """The same for scales of two levels."""
    shape, groups = scales.shape[:2], CHUNK // layout.group
    width = 2 if layout.has_bias else 1
    large = scales[:, :, : 32 * width].copy().view(np.float16).astype(np.float32)
    large = large.reshape(*shape, 8, 2, width)[:, :, g, lower]
    values = codes - np.float32(layout.zero)
    if not layout.has_bias:
        small = scales[:, :, 32:].copy().view(np.int8).reshape(*shape, groups, 8, 2)
        return values * (large[..., 0] * small[:, :, group, g, lower].astype(np.float32))
    low = scales[:, :, 64 : 64 + 16 * groups].copy().view(np.uint16).reshape(*shape, groups, 8)
    high = scales[:, :, 64 + 16 * groups :].reshape(*shape, groups, 8).astype(np.uint32)
    word = low[:, :, group, g] | high[:, :, group, g] << 16
    scale, bias = (word >> (12 * lower + 6 * i) & 63 for i in range(2))
    values = values * (large[..., 0] * scale.astype(np.float32))
    return values + large[..., 1] * bias.astype(np.float32)


def assert_round_trip(parts: list[Tensor]) -> None:
    """Assert that packing keeps every bit of the parts' values."""
    layout = layout_of(parts[0], sum(part.shape[0] for part in parts))
    packed = pack_parts(parts, layout, "cpu").numpy()
    assert packed.nbytes == layout.num_bytes
    expected = np.concatenate([part.dequantize() for part in parts])
    assert np.array_equal(unpack(packed, layout), expected)


@pytest.mark.parametrize(("bits", "zero", "has_bias", "group"), CODES)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (33, 128), (16, 384)])
def test_codes_round_trip(n: int, k: int, bits: int, zero: int, has_bias: bool, group: int) -> None:
    assert_round_trip([draw_codes(n, k, bits, zero, has_bias, group)])


@pytest.mark.parametrize(("bits", "zero", "has_bias", "group"), TWO_LEVELS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (33, 256), (16, 1280)])
def test_scales_of_two_levels_round_trip(
    n: int, k: int, bits: int, zero: int, has_bias: bool, group: int
) -> None:
    assert_round_trip([draw_two_levels(n, k, bits, zero, has_bias, group)])


@pytest.mark.parametrize(("bits", "zero", "has_bias", "group"), CODES)
def test_bfloat16_scales_round_trip(bits: int, zero: int, has_bias: bool, group: int) -> None:
    assert_round_trip([in_bfloat16(draw_codes(33, 384, bits, zero, has_bias, group))])


# Bytes of a block in the file's format, and its columns.
@pytest.mark.parametrize(
    ("part", "block_bytes", "columns"),
    [
        (draw_two_levels(16, 4096, 4, 0, True, 32), 144, 256),
        (draw_two_levels(16, 4096, 5, 0, True, 32), 176, 256),
        (draw_two_levels(16, 4096, 6, 32, False, 16), 210, 256),
        (draw_codes(16, 4096, 5, 16, False, 32), 22, 32),
        (draw_codes(16, 4096, 5, 0, True, 32), 24, 32),
        (draw_codes(16, 4096, 4, 0, True, 128), 68, 128),
    ],
    ids=["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "4 bits in groups of 128"],
)
def test_packed_weights_are_no_more_than_a_tenth_above_the_file(
    part: QuantizedTensor, block_bytes: int, columns: int
) -> None:
    n, k = part.shape
    assert layout_of(part).num_bytes <= 1.1 * n * k // columns * block_bytes


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("n", "k"), [(48, 512), (33, 96), (16, 72)])
def test_dense_values_round_trip(n: int, k: int, dtype: str) -> None:
    assert_round_trip([draw_dense(n, k, dtype)])


def test_columns_and_outputs_are_padded_with_zeros() -> None:
    part = draw_codes(17, 96, 4, 0, True, 32)
    layout = layout_of(part)
    packed = pack_parts([part], layout, "cpu").numpy()
    padded = unpack(packed, Layout(**{**vars(layout), "n": 32, "k": 128}))
    assert np.array_equal(padded[:17, :96], part.dequantize())
    assert not padded[17:].any()
    assert not padded[:, 96:].any()


def test_parts_are_stacked_in_order() -> None:
    parts = [draw_codes(n, 576, 4, 0, True, 32) for n in (64, 8, 24)]
    assert_round_trip(list(parts))


def test_more_rows_than_one_batch() -> None:
    assert_round_trip([draw_codes(8192 + 40, 64, 4, 8, False, 32)])


@pytest.mark.parametrize("k", [64, 576, 1536, 2048, 3840, 4096, 5120, 11008, 14336, 15360, 28672])
def test_padding_of_columns_keeps_weights_within_a_tenth(k: int) -> None:
    splits, warps, chunks = cut_columns(k)
    assert k <= splits * warps * chunks * CHUNK <= 1.1 * k
    assert warps <= 16


def test_refusals_name_what_is_allowed() -> None:
    with pytest.raises(LoadError, match="up to 32768 columns"):
        cut_columns(40000)
    with pytest.raises(LoadError, match="groups of 16, 32, 64, 128, got 4 bits in groups of 8"):
        layout_of(draw_codes(16, 64, 4, 0, True, 8))
    with pytest.raises(LoadError, match="multiple of 8"):
        layout_of(draw_dense(16, 68, "f32"))
