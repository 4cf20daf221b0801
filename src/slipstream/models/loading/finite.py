"""Whether a tensor holds finite numbers alone: a damaged file is named before it makes any text."""

from __future__ import annotations

import numpy as np

from slipstream.models.weights import (
    DenseTensor,
    GroupNumbers,
    Tensor,
    TwoLevel,
    float16_numbers,
    widen,
)

_F16_EXPONENT, _BF16_EXPONENT = 0x7C00, 0x7F80  # all ones: an infinity or a NaN
_PART = 1 << 20  # numbers that are checked at a time


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value, or every scale and bias, is a finite number."""
    if isinstance(tensor, DenseTensor):
        if tensor.dtype == "f32":
            return bool(np.isfinite(tensor.values).all())
        exponent = _BF16_EXPONENT if tensor.dtype == "bf16" else _F16_EXPONENT
        return not _reaches(tensor.values, exponent)
    parts = (tensor.scale,) if tensor.bias is None else (tensor.scale, tensor.bias)
    return all(_is_bounded(part, 1 << tensor.bits) for part in parts)


def _is_bounded(numbers: GroupNumbers, factor: int) -> bool:
    """Return whether the numbers of the groups, times any code below `factor`, are finite."""
    if isinstance(numbers, TwoLevel):
        return not _reaches(numbers.super, _F16_EXPONENT)
    halves = float16_numbers(numbers)
    if halves is not None:
        return not _reaches(halves, _F16_EXPONENT)
    # A damaged exponent of bfloat16 or float32 may be finite and yet overflow in the product.
    limit = np.finfo(np.float32).max / (2 * factor)
    return bool((np.abs(widen(numbers)) < limit).all())


def _reaches(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], exponent: int) -> bool:
    """Return whether any 16-bit float has all exponent bits set (numpy computes f16 slowly)."""
    mask, words = np.uint16(exponent), values.view(np.uint16).reshape(-1)
    # A part at a time: the temporaries of a whole embedding would be the peak of loading.
    parts = (words[at : at + _PART] for at in range(0, len(words), _PART))
    return any(bool(((part & mask) == mask).any()) for part in parts)
