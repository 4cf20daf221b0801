"""Canonical tensors as the native packer takes them; groups and both levels of scales are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.kernels.cpu import _native
from slipstream.models.weights import BFloat16, GroupNumbers, QuantizedTensor, Tensor, TwoLevel

BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)


def add_part(weight: Any, part: Tensor) -> None:
    """Add a matrix to a native weight, behind those that it has.

    Raises:
        LoadError: bits, a group or a width that no kernel takes; it is named.
    """
    if isinstance(part, QuantizedTensor):
        _add_quantized(weight, part)
        return
    values = np.ascontiguousarray(part.values)
    weight.add_dense(part.dtype, values.view(np.uint16) if part.dtype == "f16" else values)


def _add_quantized(weight: Any, part: QuantizedTensor) -> None:
    if part.bits not in BITS or part.group not in GROUPS:
        raise LoadError(
            f"the cpu back end takes codes of {_words(BITS)} bits in groups of {_words(GROUPS)}, "
            f"got {part.bits} bits in groups of {part.group}"
        )
    numbers, scale = _numbers(part.scale)
    bias_numbers, bias = (numbers, None) if part.bias is None else _numbers(part.bias)
    if bias_numbers != numbers:
        raise LoadError(f"scales and biases must be of one kind, got {numbers} and {bias_numbers}")
    unit = _native.SUPER if numbers == "two_level" else max(part.group, _native.GROUP)
    if part.shape[1] % unit:
        raise LoadError(
            f"a quantized matrix must be a multiple of {unit} columns wide, got {part.shape[1]}"
        )
    codes = np.ascontiguousarray(part.codes)
    weight.add_quantized(part.bits, part.zero, part.group, codes, numbers, scale, bias)


def _numbers(numbers: GroupNumbers) -> tuple[str, tuple[Any, Any]]:
    """Return their kind, and their values with the bytes of a second level."""
    if isinstance(numbers, TwoLevel):
        small = np.ascontiguousarray(numbers.small).view(np.uint8)
        return "two_level", (np.ascontiguousarray(numbers.super).view(np.uint16), small)
    if isinstance(numbers, BFloat16):
        return "bf16", (np.ascontiguousarray(numbers.bits), None)
    values = np.ascontiguousarray(numbers)
    return (
        ("f32", (values, None))
        if values.dtype == np.float32
        else ("f16", (values.view(np.uint16), None))
    )


def _words(numbers: tuple[int, ...]) -> str:
    """Return e.g. "4, 5 or 8"."""
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
