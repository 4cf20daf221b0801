"""Canonical weights: what every file format maps onto and every back end repacks from.

A quantized tensor is `w = scale * (code - zero) + bias`, scale and bias shared by a group of
consecutive columns. GGUF Q4_0 (zero 8), Q4_1 (zero 0, bias) and Q8_0 (zero 128) map onto it without
loss. The canonical form is short-lived: a loader yields it tensor by tensor, a back end repacks it
and lets it go, so codes are kept one to a byte for simplicity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A quantized matrix of shape (N, K), N outputs by K inputs.

    Attributes:
        bits: 4 or 8, the width of a code.
        codes: uint8 of shape (N, K), each in [0, 2**bits).
        zero: the code that stands for 0 before the bias.
        scale: float16 of shape (N, K / group).
        bias: float16 of shape (N, K / group), or None for none.
    """

    bits: int
    codes: npt.NDArray[np.uint8]
    zero: int
    scale: npt.NDArray[np.float16]
    bias: npt.NDArray[np.float16] | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Columns that share one scale and bias."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    def dequantize(self) -> F32:
        """Return float32 of shape (N, K), each product and sum rounded once, as GGUF defines it."""
        n, k = self.shape
        centred = self.codes.astype(np.float32) - np.float32(self.zero)
        grouped = centred.reshape(n, -1, self.group)
        values = grouped * self.scale.astype(np.float32)[:, :, None]
        if self.bias is not None:
            values = values + self.bias.astype(np.float32)[:, :, None]
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

    def dequantize(self) -> F32:
        """Return the values as float32, exactly."""
        if self.dtype == "bf16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


Tensor = QuantizedTensor | DenseTensor
