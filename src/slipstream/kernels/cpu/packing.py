"""Canonical tensors as the native packer takes them; groups and both levels of scales are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.kernels.cpu import _native
from slipstream.models.weights import (
    BFloat16,
    DenseTensor,
    GroupNumbers,
    Tensor,
    TensorInPieces,
    TwoLevel,
)

BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)
LANES = 16  # rows of a tile, which is packed as a whole


def add_part(weight: Any, part: Tensor | TensorInPieces) -> None:
    """Add a matrix to a native weight, behind those that it has.

    Raises:
        LoadError: bits, a group or a width that no kernel takes; it is named.
    """
    if isinstance(part, TensorInPieces):
        _begin(weight, part.shape, part.read(0, min(LANES, part.shape[0])))
        for first, piece in part.pieces(LANES):
            _fill(weight, first, piece)
    else:
        _begin(weight, part.shape, part)
        _fill(weight, 0, part)


def _begin(weight: Any, shape: tuple[int, ...], like: Tensor) -> None:
    """Add a matrix of a shape, of the kind of another, without its values."""
    n, k = shape
    if isinstance(like, DenseTensor):
        weight.begin_dense(n, k, like.dtype)
        return
    if like.bits not in BITS or like.group not in GROUPS:
        raise LoadError(
            f"the cpu back end takes codes of {_words(BITS)} bits in groups of {_words(GROUPS)}, "
            f"got {like.bits} bits in groups of {like.group}"
        )
    numbers, _ = _numbers(like.scale)
    bias_numbers = numbers if like.bias is None else _numbers(like.bias)[0]
    if bias_numbers != numbers:
        raise LoadError(f"scales and biases must be of one kind, got {numbers} and {bias_numbers}")
    unit = _native.SUPER if numbers == "two_level" else max(like.group, _native.GROUP)
    if k % unit:
        raise LoadError(f"a quantized matrix must be a multiple of {unit} columns wide, got {k}")
    weight.begin_quantized(n, k, like.bits, like.zero, like.group, numbers, like.bias is not None)


def _fill(weight: Any, first: int, piece: Tensor) -> None:
    """Pack the rows of the last matrix from `first` on."""
    if isinstance(piece, DenseTensor):
        values = np.ascontiguousarray(piece.values)
        weight.fill_dense(first, values.view(np.uint16) if piece.dtype == "f16" else values)
        return
    bias = None if piece.bias is None else _numbers(piece.bias)[1]
    weight.fill_quantized(first, np.ascontiguousarray(piece.codes), _numbers(piece.scale)[1], bias)


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
