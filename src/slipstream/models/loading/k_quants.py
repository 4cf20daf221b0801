"""GGUF's K-quants: blocks of 256 elements whose scales are float16 times small integers.

Q4_K and Q5_K have groups of 32 with a scale and a minimum, w = (d * s) * code - (dmin * m), where s
and m are 6-bit numbers of the group; the minimum becomes a bias by flipping the sign of dmin. Q6_K
has groups of 16, w = (d * s) * (code - 32) with s a signed byte. Every product is exact in float32,
so only the subtraction rounds, wherever it is done.

A chunk of blocks is unpacked with whole-array operations on 8-byte words, and runs of 32 codes are
then put into place as single items of 32 bytes: numpy moves those in a few nanoseconds, where loops
over short rows would take most of the time.

Layouts: `block_q4_K`, `block_q5_K`, `block_q6_K` of the GGML sources.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream.models.loading.blocks import FOUR, LOW_NIBBLES, Bytes, Shape, halves
from slipstream.models.weights import QuantizedTensor, Tensor, TwoLevel

SUPER_BLOCK = 256
_CHUNK = 1024  # blocks unpacked together: some 700 KB with all copies, which a core's cache holds
_RUN = np.dtype("V32")  # 32 codes, the unit in which a block's codes are ordered
_FIFTH_BIT = np.uint64(0x1010101010101010)
_UPPER_BITS = np.uint64(0x3030303030303030)  # bits 4 and 5
_SIX_BITS = np.uint32(0x3F3F3F3F)

Words = npt.NDArray[np.uint64]


def decode_q4_k(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q4_K: d, dmin, 12 bytes of scales, 128 of nibbles."""
    blocks = raw.reshape(-1, 144)
    codes = _unpack(blocks, _four_bits, shape)
    scale, bias = _scales_and_biases(blocks, shape)
    return QuantizedTensor(bits=4, codes=codes, zero=0, scale=scale, bias=bias)


def decode_q5_k(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q5_K: d, dmin, 12 bytes of scales, 32 of fifth bits, 128 of nibbles."""
    blocks = raw.reshape(-1, 176)
    codes = _unpack(blocks, _five_bits, shape)
    scale, bias = _scales_and_biases(blocks, shape)
    return QuantizedTensor(bits=5, codes=codes, zero=0, scale=scale, bias=bias)


def decode_q6_k(raw: Bytes, shape: Shape) -> Tensor:
    """Decode Q6_K: 128 bytes of nibbles, 64 of upper bits, 16 scales, d."""
    blocks = raw.reshape(-1, 210)
    codes = _unpack(blocks, _six_bits, shape)
    small = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).reshape(shape[0], -1)
    scale = TwoLevel(super=halves(blocks, 208, shape), small=small)
    return QuantizedTensor(bits=6, codes=codes, zero=32, scale=scale, bias=None)


def _unpack(blocks: Bytes, unpack: Callable[[Bytes, Bytes], None], shape: Shape) -> Bytes:
    """Fill codes of a tensor's shape, a chunk of blocks at a time."""
    codes = np.empty((len(blocks), SUPER_BLOCK), np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        unpack(blocks[start : start + _CHUNK], codes[start : start + _CHUNK])
    return codes.reshape(shape)


def _four_bits(blocks: Bytes, codes: Bytes) -> None:
    _place_nibbles(_words(blocks, 16, 144), codes.view(_RUN).reshape(-1, 4, 2))


def _five_bits(blocks: Bytes, codes: Bytes) -> None:
    """Bit r of the 32 bytes of fifth bits belongs to run r."""
    _place_nibbles(_words(blocks, 48, 176), codes.view(_RUN).reshape(-1, 4, 2))
    packed = _words(blocks, 16, 48)
    upper = np.empty((len(blocks), 8), _RUN)
    for run in range(8):
        upper[:, run] = _as_runs(_shift_left(packed, 4 - run) & _FIFTH_BIT)[:, 0]
    _merge(codes, upper)


def _six_bits(blocks: Bytes, codes: Bytes) -> None:
    """Each half has 64 bytes of nibbles, whose high ones go last, and 32 of pairs of bits."""
    halves_of = codes.view(_RUN).reshape(-1, 2, 2, 2)  # half, low or high nibble, run
    packed = _words(blocks, 0, 128)
    halves_of[:, :, 0] = _as_runs(packed & LOW_NIBBLES).reshape(-1, 2, 2)
    halves_of[:, :, 1] = _as_runs((packed >> FOUR) & LOW_NIBBLES).reshape(-1, 2, 2)
    pairs = _words(blocks, 128, 192)
    upper = np.empty((len(blocks), 2, 4), _RUN)
    for run in range(4):
        upper[:, :, run] = _as_runs(_shift_left(pairs, 4 - 2 * run) & _UPPER_BITS)
    _merge(codes, upper)


def _words(blocks: Bytes, start: int, stop: int) -> Words:
    """Copy the bytes [start, stop) of each block, as words."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(np.uint64)


def _as_runs(words: Words) -> npt.NDArray[np.void]:
    return words.view(_RUN)


def _place_nibbles(packed: Words, runs: npt.NDArray[np.void]) -> None:
    """Put 32 low nibbles, then the 32 high ones, for each 32 bytes; shape (blocks, 4, 2)."""
    runs[:, :, 0] = _as_runs(packed & LOW_NIBBLES)
    runs[:, :, 1] = _as_runs((packed >> FOUR) & LOW_NIBBLES)


def _shift_left(words: Words, by: int) -> Words:
    """Shift to the left, or to the right if `by` is negative."""
    return words << np.uint64(by) if by >= 0 else words >> np.uint64(-by)


def _merge(codes: Bytes, upper: npt.NDArray[np.void]) -> None:
    """Put the upper bits into the codes."""
    words = codes.view(np.uint64)
    words |= upper.reshape(-1).view(np.uint64).reshape(words.shape)


def _scales_and_biases(blocks: Bytes, shape: Shape) -> tuple[TwoLevel, TwoLevel]:
    """Unpack d, dmin and the 6-bit scales and minima of blocks of Q4_K or Q5_K.

    Of three words of four bytes, the first two hold groups 0 to 3 in their lower six bits; the
    third holds the lower nibbles of groups 4 to 7, whose upper two bits lie in the first two.
    """
    packed = np.ascontiguousarray(blocks[:, 4:16]).view("<u4")
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    small = np.empty((2, len(blocks), 2), "<u4")
    for part in range(2):
        small[part, :, 0] = packed[:, part] & _SIX_BITS
        nibbles = (packed[:, 2] >> np.uint32(4 * part)) & low
        small[part, :, 1] = nibbles | ((packed[:, part] >> np.uint32(2)) & high)
    scales, minima = small.view(np.uint8).reshape(2, shape[0], -1)
    negated = halves(blocks, 2, shape).view(np.uint16) ^ np.uint16(0x8000)
    return (
        TwoLevel(super=halves(blocks, 0, shape), small=scales),
        TwoLevel(super=negated.view(np.float16), small=minima),
    )
