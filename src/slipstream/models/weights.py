"""Canonical weights: what every file format maps onto and every back end repacks from.

A quantized tensor is `w = scale * (code - zero) + bias`, scale and bias shared by a group of
consecutive columns. They are kept as the format has them: one number a group, or in two levels, a
number for 256 columns times a small integer for each group. So all of these map onto it without
loss and without growing:

    format   bits  zero  group        scale                bias
    Q4_0     4     8     32           float16              none
    Q4_1     4     0     32           float16              float16
    Q5_0     5     16    32           float16              none
    Q5_1     5     0     32           float16              float16
    Q8_0     8     128   32           float16              none
    Q4_K     4     0     32           float16 * 6 bits     float16 * 6 bits
    Q5_K     5     0     32           float16 * 6 bits     float16 * 6 bits
    Q6_K     6     32    16           float16 * int8       none
    MLX      4, 8  0     32, 64, 128  the model's float    the model's float

The canonical form is short-lived: a loader yields it tensor by tensor, a back end repacks it and
lets it go, so codes are kept one to a byte for simplicity. Where the back end takes them, a matrix
comes in pieces of a few outputs, so that of a large one never much is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """Bfloat16 numbers, which numpy does not have.

    Attributes:
        bits: uint16, the upper half of each number's float32.
    """

    bits: npt.NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of `bits`."""
        return self.bits.shape

    def widen(self) -> F32:
        """Return the numbers as float32, exactly."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """One number for 256 columns times a small integer for each group of them.

    Attributes:
        super: float16 of shape (N, K / 256).
        small: int8 or uint8 of shape (N, K / group); uint8 stays below 64.
    """

    super: npt.NDArray[np.float16]
    small: npt.NDArray[np.int8] | npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K / group)."""
        return self.small.shape

    def widen(self) -> F32:
        """Return the products of shape (N, K / group), which float32 holds exactly."""
        n, groups = self.small.shape
        small = self.small.astype(np.float32).reshape(n, self.super.shape[1], -1)
        return (self.super.astype(np.float32)[:, :, None] * small).reshape(n, groups)


Outputs = slice | npt.NDArray[np.int32]  # of a matrix, in any order
GroupNumbers = npt.NDArray[np.float16] | npt.NDArray[np.float32] | BFloat16 | TwoLevel


def widen(numbers: GroupNumbers) -> F32:
    """Return the numbers of the groups as float32 of shape (N, K / group), exactly."""
    if isinstance(numbers, np.ndarray):
        return numbers.astype(np.float32)
    return numbers.widen()


def float16_numbers(numbers: GroupNumbers) -> npt.NDArray[np.float16] | None:
    """Return numbers that are one float16 a group, or None for another kind."""
    if isinstance(numbers, np.ndarray) and numbers.dtype == np.float16:
        return numbers.view(np.float16)  # for the type checker; a view of itself
    return None


def take_rows(numbers: GroupNumbers, outputs: Outputs) -> GroupNumbers:
    """Return the numbers of some outputs."""
    if isinstance(numbers, BFloat16):
        return BFloat16(bits=numbers.bits[outputs])
    if isinstance(numbers, TwoLevel):
        return TwoLevel(super=numbers.super[outputs], small=numbers.small[outputs])
    return numbers[outputs]


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A quantized matrix of shape (N, K), N outputs by K inputs.

    Attributes:
        bits: 4, 5, 6 or 8, the width of a code.
        codes: uint8 of shape (N, K), each in [0, 2**bits).
        zero: the code that stands for 0 before the bias.
        scale: of shape (N, K / group); the group is 16, 32, 64 or 128.
        bias: of that shape and kind too, or None for none.
    """

    bits: int
    codes: npt.NDArray[np.uint8]
    zero: int
    scale: GroupNumbers
    bias: GroupNumbers | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Columns that share one scale and bias."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    def rows(self, low: int, high: int) -> QuantizedTensor:
        """Return the outputs [low, high)."""
        return self.take(slice(low, high))

    def take(self, outputs: Outputs) -> QuantizedTensor:
        """Return some outputs."""
        return QuantizedTensor(
            bits=self.bits,
            codes=self.codes[outputs],
            zero=self.zero,
            scale=take_rows(self.scale, outputs),
            bias=None if self.bias is None else take_rows(self.bias, outputs),
        )

    def dequantize(self) -> F32:
        """Return float32 of shape (N, K), each product and sum rounded once.

        GGML defines its formats so. Float16 and bfloat16 scales leave nothing to round in the
        product, so MLX's kernels, which work in float32, mean the same values.
        """
        n, k = self.shape
        values = self.codes.astype(np.float32).reshape(n, -1, self.group)
        values -= np.float32(self.zero)
        values *= widen(self.scale)[:, :, None]
        if self.bias is not None:
            values += widen(self.bias)[:, :, None]
        return values.reshape(n, k)


@dataclass(frozen=True, kw_only=True)
class DenseTensor:
    """A dense vector or matrix in the file's own precision.

    Attributes:
        values: float32, float16, or uint16 holding bfloat16 bits; shape (N,) or (N, K).
        dtype: "f32", "f16" or "bf16".
    """

    values: npt.NDArray[np.generic]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,) or (N, K)."""
        return self.values.shape

    def rows(self, low: int, high: int) -> DenseTensor:
        """Return the outputs [low, high)."""
        return self.take(slice(low, high))

    def take(self, outputs: Outputs) -> DenseTensor:
        """Return some outputs."""
        return DenseTensor(values=self.values[outputs], dtype=self.dtype)

    def dequantize(self) -> F32:
        """Return the values as float32, exactly."""
        if self.dtype == "bf16":
            return BFloat16(bits=self.values.astype(np.uint16)).widen()
        return self.values.astype(np.float32)


Tensor = QuantizedTensor | DenseTensor

_PIECE = 1 << 20  # elements of a piece: 1 MiB of codes, 2 or 4 MiB of what they are made from


@dataclass(frozen=True, kw_only=True)
class TensorInPieces:
    """A matrix that is read by its outputs, a few at a time.

    Attributes:
        shape: (N, K).
        read: returns the outputs [low, high), of one kind all over; to be let go before the next.
    """

    shape: tuple[int, int]
    read: Callable[[int, int], Tensor]

    def pieces(self, multiple: int) -> Iterator[tuple[int, Tensor]]:
        """Yield all outputs in order, each piece with the number of its first.

        Args:
            multiple: a piece has a multiple of so many outputs, unless it is the last.
        """
        n, k = self.shape
        rows = max(_PIECE // (k * multiple), 1) * multiple
        for low in range(0, n, rows):
            yield low, self.read(low, min(low + rows, n))
