"""GGUF's dense tensors and its quantized blocks of 32 elements, mapped onto the canonical tensors.

A block holds a float16 scale, a float16 minimum in the `_1` formats, the fifth bits of its codes in
the Q5 formats, then the codes. In 4- and 5-bit blocks the low nibbles are elements 0 to 15 and the
high nibbles elements 16 to 31; bit i of the fifth bits belongs to element i.

Layouts: `block_q4_0` to `block_q8_0` of the GGML sources.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]
Decode = Callable[[Bytes, Shape], Tensor]

BLOCK = 32
LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
FOUR = np.uint64(4)
# The bits of a byte, the lowest first, as the fifth bits of eight codes in one word.
_FIFTH_BITS = (
    (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4)
    .view(np.uint64)
    .reshape(256)
)


def decode_dense(dtype: str, stored: str) -> Decode:
    """Return a decoder that keeps the elements as they are stored."""

    def decode(raw: Bytes, shape: Shape) -> Tensor:
        return DenseTensor(values=raw.view(stored).reshape(shape), dtype=dtype)

    return decode


def decode_q4_0(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q4_0: 18 bytes, w = scale * (code - 8)."""
    blocks = raw.reshape(-1, 18)
    codes = _nibbles(blocks, 2).reshape(shape)
    return QuantizedTensor(bits=4, codes=codes, zero=8, scale=halves(blocks, 0, shape), bias=None)


def decode_q4_1(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q4_1: 20 bytes, w = scale * code + minimum."""
    blocks = raw.reshape(-1, 20)
    codes = _nibbles(blocks, 4).reshape(shape)
    scale, bias = halves(blocks, 0, shape), halves(blocks, 2, shape)
    return QuantizedTensor(bits=4, codes=codes, zero=0, scale=scale, bias=bias)


def decode_q5_0(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q5_0: 22 bytes, w = scale * (code - 16)."""
    blocks = raw.reshape(-1, 22)
    codes = _five_bits(blocks, 2).reshape(shape)
    return QuantizedTensor(bits=5, codes=codes, zero=16, scale=halves(blocks, 0, shape), bias=None)


def decode_q5_1(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q5_1: 24 bytes, w = scale * code + minimum."""
    blocks = raw.reshape(-1, 24)
    codes = _five_bits(blocks, 4).reshape(shape)
    scale, bias = halves(blocks, 0, shape), halves(blocks, 2, shape)
    return QuantizedTensor(bits=5, codes=codes, zero=0, scale=scale, bias=bias)


def decode_q8_0(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q8_0: 34 bytes, w = scale * signed code."""
    blocks = raw.reshape(-1, 34)
    codes = np.empty((len(blocks), BLOCK), np.uint8)
    # Flipping the sign bit of a two's complement byte adds 128 modulo 256.
    np.bitwise_xor(blocks.view("<u2")[:, 1:], np.uint16(0x8080), out=codes.view("<u2"))
    scale = halves(blocks, 0, shape)
    return QuantizedTensor(bits=8, codes=codes.reshape(shape), zero=128, scale=scale, bias=None)


def halves(blocks: Bytes, at: int, shape: Shape) -> npt.NDArray[np.float16]:
    """Copy the float16 at byte `at` of each block, as shape (N, blocks of a row)."""
    words = blocks.view("<u2")[:, at // 2].copy()
    return words.view(np.float16).reshape(shape[0], -1)


def _nibbles(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 16 bytes at `at` of each block to 32 codes, low nibbles first."""
    packed = np.ascontiguousarray(blocks[:, at:]).view(np.uint64)
    codes = np.empty((len(blocks), 4), np.uint64)
    # A column of 8-byte words at a time: numpy's per-row cost would dominate 16-byte rows.
    for word in range(2):
        np.bitwise_and(packed[:, word], LOW_NIBBLES, out=codes[:, word])
        high = codes[:, word + 2]
        np.right_shift(packed[:, word], FOUR, out=high)
        np.bitwise_and(high, LOW_NIBBLES, out=high)
    return codes.view(np.uint8)


def _five_bits(blocks: Bytes, at: int) -> Bytes:
    """Unpack the 4 bytes of fifth bits at `at` and the 16 of nibbles behind them to 32 codes."""
    codes = _nibbles(blocks, at + 4)
    words = codes.view(np.uint64)
    for byte in range(4):
        words[:, byte] |= _FIFTH_BITS[blocks[:, at + byte]]
    return codes
