"""The tensor encodings of a GGUF file, mapped bit for bit onto the canonical tensors.

A GGUF row is a run of blocks; a quantized block holds 32 elements behind its own float16 scale (and
minimum). Decoding only moves bits: codes are unpacked to a byte each, scales are copied, nothing is
multiplied, so `Tensor.dequantize` gives the very values that the format defines. In the 4-bit
blocks the low nibbles are elements 0 to 15 and the high nibbles elements 16 to 31.

Layouts: `block_q4_0`, `block_q4_1` and `block_q8_0` of the GGML sources. K-quants and the 5-bit
formats are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import LoadError
from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]

QUANT_BLOCK = 32  # elements of a block, the same in every quantized format here


@dataclass(frozen=True, kw_only=True)
class Format:
    """One tensor encoding.

    Attributes:
        name: GGML's name, e.g. "Q4_1".
        block: elements of one block; a row holds whole blocks.
        block_bytes: bytes of one block.
        decode: maps uint8 of shape (bytes,) and the tensor's shape to the canonical tensor.
    """

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Bytes, Shape], Tensor]

    @property
    def is_quantized(self) -> bool:
        """True where elements share a scale."""
        return self.block > 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the stored size of `num_elements`, a multiple of `block`."""
        return num_elements // self.block * self.block_bytes


def supported_names() -> str:
    """Return the readable encodings as one comma-separated text, for messages."""
    return ", ".join(item.name for item in FORMATS.values())


def find_format(type_id: int) -> Format:
    """Return the encoding of a GGML type number.

    Raises:
        LoadError: an encoding that is not read here; the supported ones are listed.
    """
    if type_id in FORMATS:
        return FORMATS[type_id]
    name = _OTHER_TYPES.get(type_id, "unknown")
    raise LoadError(
        f"tensor type must be one of {supported_names()}, got {name} (type {type_id})",
        hint="requantise the model to Q4_0, Q4_1 or Q8_0",
    )


def _dense(dtype: str, stored: str) -> Callable[[Bytes, Shape], Tensor]:
    def decode(raw: Bytes, shape: Shape) -> Tensor:
        return DenseTensor(values=raw.view(stored).reshape(shape), dtype=dtype)

    return decode


def _halves(blocks: Bytes, at: int, shape: Shape) -> npt.NDArray[np.float16]:
    """Copy the float16 at byte `at` of each block, as shape (N, blocks of a row)."""
    words = blocks.view("<u2")[:, at // 2].copy()
    return words.view(np.float16).reshape(shape[0], -1)


def _nibbles(blocks: Bytes, at: int, shape: Shape) -> Bytes:
    """Unpack the 16 bytes at `at` of each block to 32 codes, low nibbles first."""
    packed = np.ascontiguousarray(blocks[:, at:]).view(np.uint64)
    codes = np.empty((len(blocks), 4), np.uint64)
    # A column of 8-byte words at a time: numpy's per-row cost would dominate 16-byte rows.
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    for word in range(2):
        np.bitwise_and(packed[:, word], mask, out=codes[:, word])
        high = codes[:, word + 2]
        np.right_shift(packed[:, word], np.uint64(4), out=high)
        np.bitwise_and(high, mask, out=high)
    return codes.view(np.uint8).reshape(shape)


def _q4_0(raw: Bytes, shape: Shape) -> Tensor:
    blocks = raw.reshape(-1, 18)
    scale = _halves(blocks, 0, shape)
    return QuantizedTensor(bits=4, codes=_nibbles(blocks, 2, shape), zero=8, scale=scale, bias=None)


def _q4_1(raw: Bytes, shape: Shape) -> Tensor:
    blocks = raw.reshape(-1, 20)
    scale, bias = _halves(blocks, 0, shape), _halves(blocks, 2, shape)
    return QuantizedTensor(bits=4, codes=_nibbles(blocks, 4, shape), zero=0, scale=scale, bias=bias)


def _q8_0(raw: Bytes, shape: Shape) -> Tensor:
    blocks = raw.reshape(-1, 34)
    scale = _halves(blocks, 0, shape)
    codes = np.empty((len(blocks), QUANT_BLOCK), np.uint8)
    # Flipping the sign bit of a two's complement byte adds 128 modulo 256.
    np.bitwise_xor(blocks.view("<u2")[:, 1:], np.uint16(0x8080), out=codes.view("<u2"))
    return QuantizedTensor(bits=8, codes=codes.reshape(shape), zero=128, scale=scale, bias=None)


# Keys are GGML's type numbers (enum ggml_type).
FORMATS = {
    0: Format(name="F32", block=1, block_bytes=4, decode=_dense("f32", "<f4")),
    1: Format(name="F16", block=1, block_bytes=2, decode=_dense("f16", "<f2")),
    30: Format(name="BF16", block=1, block_bytes=2, decode=_dense("bf16", "<u2")),
    2: Format(name="Q4_0", block=QUANT_BLOCK, block_bytes=18, decode=_q4_0),
    3: Format(name="Q4_1", block=QUANT_BLOCK, block_bytes=20, decode=_q4_1),
    8: Format(name="Q8_0", block=QUANT_BLOCK, block_bytes=34, decode=_q8_0),
}

# Names of encodings that files in the wild carry, so that a refusal can say which it met.
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
