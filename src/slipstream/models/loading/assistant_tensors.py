"""The tensors of an assistant's checkpoint: safetensors to canonical form and back.

A dense matrix is one tensor, float16 or bfloat16. A quantized matrix `x` is stored as `x.codes` and
`x.scale`, float16 of shape (N, K / 32), in the two canonical forms that GGUF knows as Q4_1 and
Q8_0: 4 bits with `x.bias`, two codes to a byte, the even column in the low nibble; 8 bits around
128 without a bias. Norm weights are float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from slipstream.errors import LoadError
from slipstream.models.loading.finite import is_finite
from slipstream.models.weights import (
    F32,
    DenseTensor,
    QuantizedTensor,
    Tensor,
    float16_numbers,
)

GROUP = 32  # columns of a scale, the group of every quantized format that the back ends take
_ZERO = {4: 0, 8: 128}
_DENSE = {"F16": ("f16", np.float16), "BF16": ("bf16", np.uint16), "F32": ("f32", np.float32)}
_STORED = {"U8": np.uint8, "I32": np.int32, **{name: item[1] for name, item in _DENSE.items()}}

I32 = npt.NDArray[np.int32]
Stored = dict[str, tuple[str, npt.NDArray[np.generic]]]
Vectors = Mapping[str, tuple[int]]
Matrices = Mapping[str, tuple[int, int]]


def quantize(values: F32, bits: int) -> QuantizedTensor:
    """Round a float32 matrix of shape (N, K) to codes of 4 or 8 bits.

    4 bits span each group's range (scale and bias), 8 bits its largest magnitude (scale alone).
    """
    groups = values.reshape(len(values), -1, GROUP)
    bias = None
    if bits == 4:
        low = groups.min(axis=2)
        bias = low.astype(np.float16)
        scale = ((groups.max(axis=2) - low) / np.float32(15)).astype(np.float16)
        groups = groups - bias.astype(np.float32)[:, :, None]
    else:
        scale = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[:, :, None]
    codes = np.clip(np.rint(groups / divisor) + _ZERO[bits], 0, 2**bits - 1).astype(np.uint8)
    return QuantizedTensor(
        bits=bits, codes=codes.reshape(values.shape), zero=_ZERO[bits], scale=scale, bias=bias
    )


def save_tensors(
    path: Path,
    tensors: Mapping[str, F32],
    vectors: Vectors,
    matrices: Matrices,
    maps: Mapping[str, I32],
    bits: int | None,
) -> None:
    """Write a checkpoint's tensors.

    Args:
        tensors: float32; exactly the names of `vectors` and `matrices`.
        maps: tensors of integers.
        bits: 4 or 8, or None for float16.

    Raises:
        LoadError: a tensor is missing, unknown, misshapen, or not finite once rounded.
    """
    shapes: dict[str, tuple[int, ...]] = {**vectors, **matrices}
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise LoadError(f"tensor {name} is {'missing' if name in shapes else 'unknown'}")
    stored: dict[str, npt.NDArray[np.generic]] = {**maps}
    for name, shape in shapes.items():
        values = np.ascontiguousarray(tensors[name], dtype=np.float32)
        if values.shape != shape:
            raise LoadError(f"tensor {name} must have shape {list(shape)}, got {values.shape}")
        parts: Mapping[str, npt.NDArray[np.generic]]
        if name in vectors:
            parts = {name: values}
        elif bits is None:
            with np.errstate(over="ignore"):  # caught below
                parts = {name: values.astype(np.float16)}
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                parts = _split(name, quantize(values, bits))
        for part in parts.values():
            if part.dtype != np.uint8 and not np.isfinite(part.astype(np.float32)).all():
                raise LoadError(f"tensor {name} holds an infinity or NaN")
        stored |= parts
    save_file(stored, path)


def load_tensors(
    path: Path, vectors: Vectors, matrices: Matrices, maps: Iterable[str], bits: int | None
) -> tuple[dict[str, Tensor], dict[str, I32]]:
    """Read a checkpoint's tensors, and apart from them those of integers, which `maps` names.

    Raises:
        LoadError: the file is missing, damaged, or a tensor is missing, unknown, of another shape
            or type, or not finite.
    """
    stored = _read(path)
    tensors: dict[str, Tensor] = {}
    for name, shape in vectors.items():
        tensors[name] = DenseTensor(values=_take(stored, name, shape, ("F32",)), dtype="f32")
    for name, (n, k) in matrices.items():
        if bits is None:
            dtype = _DENSE[stored[name][0]][0] if _is_dense(stored, name) else "f16"
            tensors[name] = DenseTensor(
                values=_take(stored, name, (n, k), ("F16", "BF16")), dtype=dtype
            )
        else:
            tensors[name] = _join(stored, name, n, k, bits)
    numbers = {}
    for name in maps:
        if name not in stored:
            raise LoadError(f"tensor {name} is missing")
        numbers[name] = stored.pop(name)[1]
    for name in sorted(stored):
        raise LoadError(f"tensor {name} is unexpected")
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise LoadError(f"tensor {name} holds an infinity or NaN")
    return tensors, numbers  # type: ignore[return-value] # their reader checks the dtype


def _read(path: Path) -> Stored:
    try:
        entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path.name} cannot be read: {error}") from error
    stored: Stored = {}
    for name, entry in entries:
        dtype = _STORED.get(entry["dtype"])
        if dtype is None:
            raise LoadError(
                f"tensor {name} must be one of {', '.join(_STORED)}, got {entry['dtype']}"
            )
        values = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
        stored[name] = entry["dtype"], values
    return stored


def _is_dense(stored: Stored, name: str) -> bool:
    return name in stored and stored[name][0] in _DENSE


def _take(
    stored: Stored, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> npt.NDArray[np.generic]:
    """Remove a tensor from what was read, once it is what it must be."""
    if name not in stored:
        raise LoadError(f"tensor {name} of shape {list(shape)} is missing")
    dtype, values = stored.pop(name)
    if values.shape != shape or dtype not in dtypes:
        raise LoadError(
            f"tensor {name} must be {' or '.join(dtypes)} of shape {list(shape)}, "
            f"got {dtype} of shape {list(values.shape)}"
        )
    return values


def _split(name: str, tensor: QuantizedTensor) -> dict[str, npt.NDArray[np.generic]]:
    codes = tensor.codes
    if tensor.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    parts: dict[str, npt.NDArray[np.generic]] = {f"{name}.codes": codes}
    for part, numbers in (("scale", tensor.scale), ("bias", tensor.bias)):
        halves = None if numbers is None else float16_numbers(numbers)
        if halves is not None:  # `quantize` makes nothing else
            parts[f"{name}.{part}"] = halves
    return parts


def _join(stored: Stored, name: str, n: int, k: int, bits: int) -> QuantizedTensor:
    packed = _take(stored, f"{name}.codes", (n, k * bits // 8), ("U8",)).view(np.uint8)
    codes = (
        packed
        if bits == 8
        else np.stack([packed & np.uint8(15), packed >> np.uint8(4)], 2).reshape(n, k)
    )
    parts = {
        part: _take(stored, f"{name}.{part}", (n, k // GROUP), ("F16",)).view(np.float16)
        for part in (("scale", "bias") if bits == 4 else ("scale",))
    }
    return QuantizedTensor(
        bits=bits, codes=codes, zero=_ZERO[bits], scale=parts["scale"], bias=parts.get("bias")
    )
